// What the loops of lamb.cpp offer to lamb_binding.cpp.
#pragma once

#include <ds_kernels/lamb.h>
#include <ds_kernels/slices.h>

namespace ds_kernels::cpu {

// The first loop: updates the moments of `count` elements in place, and gives the sums over each unit of them
// (Slices::kUnit elements; the last unit may be shorter). Params and grads are read only.
using LambMomentsLoop = void (*)(const void* params, const void* grads, void* exp_avgs, void* exp_avg_sqs,
                                 int64_t count, const LambStep& step, LambSums* sums);

// Where the second loop writes the new parameters once more, in a dtype of their own; nowhere if `data` is null.
struct LambCopy {
  void* data;
  Dtype dtype;
};

// The second loop: takes `step_size` times the direction off the parameters. The moments are read only.
using LambParamsLoop = void (*)(void* params, const void* exp_avgs, const void* exp_avg_sqs, LambCopy copy,
                                int64_t count, const LambStep& step, float step_size);

struct LambLoops {
  // States have the parameters' dtype, or are float. Gradients have the parameters' dtype, or are float; with float
  // parameters they have any dtype. Null for others.
  LambMomentsLoop (*moments)(Dtype params, Dtype grads, bool float_states);
  LambParamsLoop (*params)(Dtype params, bool float_states);
};

}  // namespace ds_kernels::cpu
