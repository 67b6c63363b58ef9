// What the loops of adagrad.cpp offer to adagrad_binding.cpp.
#pragma once

#include <ds_kernels/adagrad.h>

namespace ds_kernels::cpu {

// Updates `count` elements in place; grads are read only.
using AdagradLoop = void (*)(void* params, const void* grads, void* state_sums, int64_t count, const AdagradStep& step);

struct AdagradLoops {
  // Gradients and states have the parameters' dtype, or are float.
  AdagradLoop (*update)(Dtype params, bool float_grads, bool float_states);
};

}  // namespace ds_kernels::cpu
