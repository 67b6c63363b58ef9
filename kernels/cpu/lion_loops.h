// What the loops of lion.cpp offer to lion_binding.cpp.
#pragma once

#include <ds_kernels/lion.h>

namespace ds_kernels::cpu {

// Updates `count` elements in place; grads are read only.
using LionLoop = void (*)(void* params, const void* grads, void* exp_avgs, int64_t count, const LionStep& step);

struct LionLoops {
  // Gradients and states have the parameters' dtype, or are float.
  LionLoop (*update)(Dtype params, bool float_grads, bool float_states);
};

}  // namespace ds_kernels::cpu
