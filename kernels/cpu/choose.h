// From the dtypes of an op's tensors to the loop for them.
#pragma once

#include <ds_kernels/config.h>

namespace ds_kernels::cpu {
inline namespace DS_KERNELS_CPU_LEVEL {

template <template <class, class, class> class Update>
using Loop = decltype(&Update<float, float, float>::run);

template <template <class, class, class> class Update, class Param>
Loop<Update> choose_for(bool float_grads, bool float_states) {
  if (float_grads) return float_states ? Update<Param, float, float>::run : Update<Param, float, Param>::run;
  return float_states ? Update<Param, Param, float>::run : Update<Param, Param, Param>::run;
}

// `Update<Param, Grad, State>::run` for parameters of dtype `params`, gradients and states of that dtype or float.
// Update's name must be the family's own: it is part of this function's, and the linker merges functions of one name.
template <template <class, class, class> class Update>
Loop<Update> choose(Dtype params, bool float_grads, bool float_states) {
  switch (params) {
    case Dtype::BFloat16: return choose_for<Update, BFloat16>(float_grads, float_states);
    case Dtype::Float16: return choose_for<Update, Float16>(float_grads, float_states);
    default: return Update<float, float, float>::run;
  }
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels::cpu
