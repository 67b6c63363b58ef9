// For a device's own kernels, which are libraries of their own on torch's stable ABI: the way to the runtime's streams.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "runtime.h"

namespace runtime {

// The stream on which the caller expects work with tensors of this device.
inline Stream current_stream(int device) {
  return {device, torch::stable::accelerator::getCurrentStream(device).id()};
}
inline Stream current_stream(const torch::stable::Tensor& tensor) {
  return current_stream(static_cast<int>(tensor.get_device_index()));
}

}  // namespace runtime
