// ds_plugin::lion_ for tensors in host memory.
#include "lion_loops.h"
#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(LionLoops, lion_loops)

namespace {

void lion_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs, double lr, double beta1,
           double beta2, double weight_decay) {
  const char* op = "lion_";
  MultiTensor tensors(op, {{"params", params, true}, {"grads", grads, false}, {"exp_avgs", exp_avgs, true}});
  tensors.check_dtypes();
  const bool float_grads = tensors.dtype(1) == Dtype::Float32, float_states = tensors.dtype(2) == Dtype::Float32;
  const LionLoop loop = loops_for(op, all_lion_loops()).update(tensors.dtype(0), float_grads, float_states);
  const LionStep step = lion_step(lr, beta1, beta2, weight_decay);
  run<3>(tensors, [&](void** at, size_t, int64_t count) { loop(at[0], at[1], at[2], count, step); });
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) { m.impl("lion_", DS_KERNELS_BOX(&lion_)); }

}  // namespace ds_kernels::cpu
