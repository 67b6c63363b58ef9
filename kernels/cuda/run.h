// Runs a launcher over the tensors of a multi-tensor op, on their device and its current stream.
#pragma once

#include <ds_kernels/multi_tensor.h>

#include "device.h"
#include "tensor_lists.h"

namespace ds_kernels::cuda {

// Calls `launcher(lists, stream)`; afterwards copies results back to tensors that had to be copied, on the same stream.
template <class Launcher>
void run(MultiTensor& tensors, const TensorList& first, const Launcher& launcher) {
  if (tensors.size() == 0) return;
  TensorLists lists{tensors.lists(), &tensors.numels(), {}};
  lists.data.reserve(tensors.lists() * tensors.size());
  for (size_t list = 0; list < tensors.lists(); ++list) {
    for (size_t tensor = 0; tensor < tensors.size(); ++tensor) lists.data.push_back(tensors.data(list, tensor));
  }
  const Device device(first[0].device_index());
  launcher(lists, device.stream());
  tensors.write_back();
}

}  // namespace ds_kernels::cuda
