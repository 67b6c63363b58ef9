// The tensors of a multi-tensor op as plain addresses. No torch, no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ds_kernels::cuda {

struct TensorLists {
  size_t lists = 0;
  const std::vector<int64_t>* numels = nullptr;  // one for each tensor; the same in all lists
  std::vector<void*> data;                       // list after list

  size_t size() const { return numels->size(); }
  void* at(size_t list, size_t tensor) const { return data[list * size() + tensor]; }
};

}  // namespace ds_kernels::cuda
