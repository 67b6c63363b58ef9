// The names of CUDA's runtime that the kernels use, for HIP's compiler: with this folder before others on its path it
// compiles the same sources. A warp of the kernels has 32 lanes; on AMD's 64 lanes wide wavefronts two of them share one.
#pragma once

#include <hip/hip_runtime.h>

using cudaError_t = hipError_t;
using cudaStream_t = hipStream_t;
constexpr hipError_t cudaSuccess = hipSuccess;
inline hipError_t cudaGetLastError() { return hipGetLastError(); }
inline const char* cudaGetErrorString(hipError_t error) { return hipGetErrorString(error); }
inline hipError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments, size_t shared,
                                   hipStream_t stream) {
  return hipLaunchKernel(kernel, blocks, threads, arguments, shared, stream);
}

// Kernels get their arguments by value either way.
#define __grid_constant__

namespace ds_kernels::cuda {
constexpr int kLanes = 32;
}

template <class T>
__device__ inline T __shfl_xor_sync(unsigned, T value, int lanes) {
  return __shfl_xor(value, lanes, ds_kernels::cuda::kLanes);
}
template <class T>
__device__ inline T __shfl_up_sync(unsigned, T value, unsigned lanes) {
  return __shfl_up(value, lanes, ds_kernels::cuda::kLanes);
}

// A store that stays in the caches, as CUDA's default is.
template <class T>
__device__ inline void __stwb(T* to, T value) {
  *to = value;
}
