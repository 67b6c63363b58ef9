// The names of CUDA's runtime that the kernels use, for HIP's compiler: with this folder before others on its path it
// compiles the same sources. A warp of the kernels is a wavefront, of 64 lanes on gfx9.
#pragma once

#include <hip/hip_runtime.h>

#include <cstdint>

#ifndef DS_KERNELS_WARP_THREADS
#define DS_KERNELS_WARP_THREADS 64
#endif
#ifdef __HIP_DEVICE_COMPILE__
static_assert(DS_KERNELS_WARP_THREADS <= __AMDGCN_WAVEFRONT_SIZE, "shuffles reach no further than a wavefront");
#endif

using cudaError_t = hipError_t;
using cudaStream_t = hipStream_t;
constexpr hipError_t cudaSuccess = hipSuccess;
inline hipError_t cudaGetLastError() { return hipGetLastError(); }
inline const char* cudaGetErrorString(hipError_t error) { return hipGetErrorString(error); }
constexpr hipDeviceAttribute_t cudaDevAttrMultiProcessorCount = hipDeviceAttributeMultiprocessorCount;
inline hipError_t cudaGetDevice(int* device) { return hipGetDevice(device); }
inline hipError_t cudaDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  return hipDeviceGetAttribute(value, attribute, device);
}
inline hipError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments, size_t shared,
                                   hipStream_t stream) {
  return hipLaunchKernel(kernel, blocks, threads, arguments, shared, stream);
}

// Kernels get their arguments by value either way.
#define __grid_constant__

template <class T>
__device__ inline T __shfl_xor_sync(uint64_t, T value, int lanes) {
  return __shfl_xor(value, lanes, DS_KERNELS_WARP_THREADS);
}
template <class T>
__device__ inline T __shfl_up_sync(uint64_t, T value, unsigned lanes) {
  return __shfl_up(value, lanes, DS_KERNELS_WARP_THREADS);
}

// A store that stays in the caches, as CUDA's default is.
template <class T>
__device__ inline void __stwb(T* to, T value) {
  *to = value;
}
