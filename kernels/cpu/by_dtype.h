// From the dtype of an op's tensors to the loop for it.
#pragma once

#include <ds_kernels/config.h>

namespace ds_kernels::cpu {
inline namespace DS_KERNELS_CPU_LEVEL {

// `Loop<Element>::run` for elements of `dtype`. Loop's name must be the family's own: it is part of this function's,
// and the linker merges functions of one name.
template <template <class> class Loop>
decltype(&Loop<float>::run) by_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::BFloat16: return Loop<BFloat16>::run;
    case Dtype::Float16: return Loop<Float16>::run;
    default: return Loop<float>::run;
  }
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels::cpu
