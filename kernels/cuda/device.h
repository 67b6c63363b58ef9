// The device of an op's tensors, as torch sees it: current within a scope, and its current stream.
#pragma once

#include <ds_kernels/binding.h>

#include "stream.h"

// The dispatch key of these kernels. Tests run them on the host, as CPU kernels.
#ifndef DS_KERNELS_CUDA_KEY
#define DS_KERNELS_CUDA_KEY CUDA
#endif

namespace ds_kernels::cuda {

#ifdef DS_KERNELS_CUDA_ON_HOST

class Device {
 public:
  explicit Device(int32_t) {}
  int32_t type() const { return aoti_torch_device_type_cpu(); }
  int32_t index() const { return 0; }
  Stream stream() const { return nullptr; }
};

#else

class Device {
 public:
  // Makes the device of this index current until the end of the scope.
  explicit Device(int32_t index) : index_(index) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_create_cuda_guard(index, &guard_));
  }
  ~Device() { aoti_torch_delete_cuda_guard(guard_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // As torch numbers devices.
  int32_t type() const { return aoti_torch_device_type_cuda(); }
  int32_t index() const { return index_; }

  // The stream that torch has made current on it.
  Stream stream() const {
    void* stream;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return stream;
  }

 private:
  int32_t index_;
  CUDAGuardHandle guard_;
};

#endif

}  // namespace ds_kernels::cuda
