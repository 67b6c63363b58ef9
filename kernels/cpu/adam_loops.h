// What the loops of adam.cpp offer to adam_binding.cpp.
#pragma once

#include <ds_kernels/adam.h>

namespace ds_kernels::cpu {

// Updates `count` elements in place; grads are read only.
using AdamLoop = void (*)(void* params, const void* grads, void* exp_avgs, void* exp_avg_sqs, int64_t count,
                          const AdamStep& step);

struct AdamLoops {
  // Gradients and states have the parameters' dtype, or are float.
  AdamLoop (*update)(Dtype params, bool float_grads, bool float_states);
  AdamLoop rollback;  // float only
};

}  // namespace ds_kernels::cpu
