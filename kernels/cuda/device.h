// A CUDA device as a device of <ds_kernels/ops/...>: current within a scope; work goes to its current stream.
#pragma once

#include <ds_kernels/arguments.h>

#include "stream.h"

// The dispatch key of these kernels. Tests run them on the host, as CPU kernels.
#ifndef DS_KERNELS_CUDA_KEY
#define DS_KERNELS_CUDA_KEY CUDA
#endif

namespace ds_kernels::cuda {

#ifdef DS_KERNELS_CUDA_ON_HOST

class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t) {}
  int32_t type() const { return aoti_torch_device_type_cpu(); }
  int32_t index() const { return 0; }
  void* stream() const { return nullptr; }
};

#else

class CurrentDevice {
 public:
  // Makes the device of this index current until the end of the scope.
  explicit CurrentDevice(int32_t index) : index_(index) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_create_cuda_guard(index, &guard_));
  }
  ~CurrentDevice() { aoti_torch_delete_cuda_guard(guard_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  // As torch numbers devices.
  int32_t type() const { return aoti_torch_device_type_cuda(); }
  int32_t index() const { return index_; }

  // The stream that torch has made current on it.
  void* stream() const {
    void* stream;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return stream;
  }

 private:
  int32_t index_;
  CUDAGuardHandle guard_;
};

#endif

// Torch's current stream. Torch's allocator keeps memory for the current stream, so that it may be given back before the
// kernels have run.
class TorchStream final : public Stream {
 public:
  TorchStream(const char* op, const CurrentDevice& device) : Stream(op), device_(device) {}

  void* handle() const override { return device_.stream(); }

 private:
  void* memory(int64_t bytes) const override {
    const int64_t floats = (bytes + 3) / 4;
    tensors_.push_back(new_tensor(vector_of(floats), aoti_torch_dtype_float32(), device_.type(), device_.index()));
    return tensors_.back().data_ptr();
  }

  const CurrentDevice& device_;
  mutable std::vector<Tensor> tensors_;
};

class Device : public CurrentDevice {
 public:
  using CurrentDevice::CurrentDevice;

  template <class Work>
  void run(const char* op, const Work& work, Dtype dtype) const {
    compute(work, dtype, TorchStream(op, *this));
  }
};

}  // namespace ds_kernels::cuda
