// The tensors of a multi-tensor op as plain addresses. No torch, no standard library: loops of any level read it.
#pragma once

#include <cstddef>
#include <cstdint>

#include <ds_kernels/config.h>

namespace ds_kernels {

// `lists` lists of `size` tensors each. The tensors at one index have the same number of elements.
struct TensorLists {
  size_t lists, size;
  const int64_t* numels;  // one for each tensor
  void* const* data;      // list after list
  const Dtype* dtypes;    // one for each list

  DS_KERNELS_INLINE void* at(size_t list, size_t tensor) const { return data[list * size + tensor]; }
  DS_KERNELS_INLINE bool is_float(size_t list) const { return dtypes[list] == Dtype::Float32; }
};

// The constants of an optimizer's step: one for all tensors, or one each.
template <class Step>
struct Steps {
  const Step* steps;
  bool each;

  DS_KERNELS_INLINE const Step& of(size_t tensor) const { return steps[each ? tensor : 0]; }
};

}  // namespace ds_kernels
