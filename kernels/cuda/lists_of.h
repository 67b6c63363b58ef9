// The addresses that kernels need of a multi-tensor op's tensors.
#pragma once

#include <ds_kernels/multi_tensor.h>

#include "tensor_lists.h"

namespace ds_kernels::cuda {

// Valid as long as `tensors`.
inline TensorLists lists_of(const MultiTensor& tensors) {
  TensorLists lists{tensors.lists(), &tensors.numels(), {}};
  lists.data.reserve(tensors.lists() * tensors.size());
  for (size_t list = 0; list < tensors.lists(); ++list) {
    for (size_t tensor = 0; tensor < tensors.size(); ++tensor) lists.data.push_back(tensors.data(list, tensor));
  }
  return lists;
}

}  // namespace ds_kernels::cuda
