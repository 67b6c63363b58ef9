// For a device's own kernels, which are libraries of their own on torch's stable ABI: the way to the runtime's streams.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "runtime.h"

namespace runtime {

// The stream on which the caller expects work with this tensor.
inline Stream current_stream(const torch::stable::Tensor& tensor) {
  const auto device = tensor.get_device_index();
  return {static_cast<int>(device), torch::stable::accelerator::getCurrentStream(device).id()};
}

}  // namespace runtime
