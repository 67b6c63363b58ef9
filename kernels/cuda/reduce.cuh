// Sums and maxima over a block's threads, in an order that depends on nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace ds_kernels::cuda {

// Host and device must agree on it, and a HIP compiler knows it only for the device: so it is an argument, 64 for AMD's
// GPUs whose wavefronts have as many lanes (gfx9).
#ifndef DS_KERNELS_WARP_THREADS
#define DS_KERNELS_WARP_THREADS 32
#endif
constexpr int kWarpThreads = DS_KERNELS_WARP_THREADS;
static_assert(kWarpThreads == 32 || kWarpThreads == 64, "threads that run in step");
using Lanes = std::conditional_t<kWarpThreads == 64, uint64_t, uint32_t>;  // a bit each
constexpr Lanes kWholeWarp = ~Lanes{0};

// Two numbers whose sums are taken together: threads wait once for both.
template <class T>
struct Two {
  T first, second;
};
template <class T>
__device__ __forceinline__ Two<T> operator+(Two<T> a, Two<T> b) {
  return {a.first + b.first, a.second + b.second};
}

template <class T>
__device__ __forceinline__ T of_other_lane(T x, int mask) {
  return __shfl_xor_sync(kWholeWarp, x, mask);
}
template <class T>
__device__ __forceinline__ Two<T> of_other_lane(Two<T> x, int mask) {
  return {of_other_lane(x.first, mask), of_other_lane(x.second, mask)};
}

// Each with what changes nothing that it is combined with.
struct Sum {
  template <class T>
  static __device__ __forceinline__ T nothing() {
    return {};
  }
  template <class T>
  static __device__ __forceinline__ T combine(T a, T b) {
    return a + b;
  }
};

// A NaN on either side is lost: whoever needs it finds it in the sums that follow.
struct Maximum {
  template <class T>
  static __device__ __forceinline__ float nothing() {
    return -__builtin_huge_valf();
  }
  static __device__ __forceinline__ float combine(float a, float b) { return fmaxf(a, b); }
};

struct Larger {
  template <class T>
  static __device__ __forceinline__ int32_t nothing() {
    return INT32_MIN;
  }
  template <class T>
  static __device__ __forceinline__ T combine(T a, T b) {
    return a > b ? a : b;
  }
};

// `x` of all threads of a warp, combined; every thread gets it.
template <class Operation, class T>
__device__ __forceinline__ T over_warp(T x) {
#pragma unroll
  for (int mask = kWarpThreads / 2; mask > 0; mask /= 2) x = Operation::combine(x, of_other_lane(x, mask));
  return x;
}

namespace detail {

template <class Operation, class T>
__device__ __forceinline__ T over_block(T x, T* parts) {
  const int thread = static_cast<int>(threadIdx.x), warps = static_cast<int>(blockDim.x) / kWarpThreads;
  const int lane = thread % kWarpThreads;
  x = over_warp<Operation>(x);
  if (lane == 0) parts[thread / kWarpThreads] = x;
  __syncthreads();
  return over_warp<Operation>(lane < warps ? parts[lane] : Operation::template nothing<T>());
}

}  // namespace detail

// `x` of all threads of a block, combined; every thread gets it. All threads must call it; blockDim.x is a multiple of
// a warp.
template <class Operation, class T>
__device__ __forceinline__ T over_block(T x) {
  __shared__ T parts[kWarpThreads];
  __syncthreads();  // the parts of a call before this one have been read
  return detail::over_block<Operation>(x, parts);
}

// The same with one barrier a call. Two sets of parts take turns: who is past the barrier of a call has read the parts
// of the one before.
class OverBlock {
 public:
  template <class Operation, class T>
  __device__ __forceinline__ T combine(T x) {
    __shared__ T parts[2][kWarpThreads];
    turn_ ^= 1;
    return detail::over_block<Operation>(x, parts[turn_]);
  }

 private:
  int turn_ = 0;
};

}  // namespace ds_kernels::cuda
