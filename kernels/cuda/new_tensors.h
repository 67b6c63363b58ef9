// Room for a launch. torch's allocator keeps its memory for the current stream, so that it may go out of scope before
// the kernels have run.
#pragma once

#include <ds_kernels/arguments.h>

#include "device.h"

namespace ds_kernels::cuda {

// So many floats on a device.
class Room {
 public:
  Room(const Device& device, int64_t floats) {
    if (floats > 0) {
      tensor_ = new_tensor(vector_of(floats), aoti_torch_dtype_float32(), device.type(), device.index());
    }
  }

  // Null if there are none.
  float* data() const { return tensor_ ? static_cast<float*>(tensor_->data_ptr()) : nullptr; }

 private:
  OptionalTensor tensor_;
};

}  // namespace ds_kernels::cuda
