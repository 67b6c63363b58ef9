// Launching a kernel, with its failure reported. Nothing here waits for the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "stream.h"

namespace ds_kernels::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // it has been noticed: the next caller must not find it
  throw std::runtime_error(std::string("CUDA error in ") + what + ": " + cudaGetErrorString(error));
}

namespace detail {
template <class T>
struct Identity {
  using type = T;
};
}  // namespace detail

// So many blocks in a row, if a launch can have them.
inline dim3 grid(const Stream& stream, int64_t blocks) {
  constexpr int64_t kMost = 0x7fffffff;
  if (blocks > kMost) {
    throw std::runtime_error(std::string("ds_plugin::") + stream.op() + ": the tensor has too many rows for one launch: " +
                             std::to_string(blocks) + " blocks; expected at most " + std::to_string(kMost));
  }
  return dim3(static_cast<unsigned>(blocks));
}

// Of the current device.
inline int64_t multiprocessors(const Stream& stream) {
  int device, count;
  check(cudaGetDevice(&device), stream.op());
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), stream.op());
  return count;
}

// Runs `kernel` with `blocks` x `rows` blocks of `threads`. Arguments are converted to the kernel's own types.
template <class... Parameters>
void launch(const Stream& stream, void (*kernel)(Parameters...), dim3 blocks, unsigned threads,
            const typename detail::Identity<Parameters>::type&... arguments) {
  if (blocks.x == 0 || blocks.y == 0) return;
#ifdef DS_KERNELS_CUDA_ON_HOST
  on_host::run(kernel, blocks, threads, arguments...);
  (void)stream;
#else
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, dim3(threads), pointers, 0,
                         static_cast<cudaStream_t>(stream.handle())),
        stream.op());
#endif
}

}  // namespace ds_kernels::cuda
