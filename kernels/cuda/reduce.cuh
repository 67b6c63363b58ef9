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

struct Sum {
  template <class T>
  static __device__ __forceinline__ T combine(T a, T b) {
    return a + b;
  }
};

// A NaN on either side may be lost: whoever needs it finds it in the sums that follow.
struct Maximum {
  static __device__ __forceinline__ float combine(float a, float b) { return a > b ? a : b; }
};

struct Larger {
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

// `x` of all threads of a block, combined; every thread gets it. All threads must call it; blockDim.x is a multiple of
// a warp.
template <class Operation, class T>
__device__ __forceinline__ T over_block(T x) {
  __shared__ T parts[kWarpThreads];
  const int thread = static_cast<int>(threadIdx.x), warps = static_cast<int>(blockDim.x) / kWarpThreads;
  x = over_warp<Operation>(x);
  __syncthreads();  // the parts of a call before this one have been read
  if (thread % kWarpThreads == 0) parts[thread / kWarpThreads] = x;
  __syncthreads();
  x = parts[0];
  for (int warp = 1; warp < warps; ++warp) x = Operation::combine(x, parts[warp]);
  return x;
}

}  // namespace ds_kernels::cuda
