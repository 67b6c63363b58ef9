// ds_plugin::adagrad_ for tensors in host memory.
#include "adagrad_loops.h"
#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(AdagradLoops, adagrad_loops)

namespace {

void adagrad_(const TensorList& params, const TensorList& grads, const TensorList& state_sums, double lr, double eps,
              double weight_decay) {
  const char* op = "adagrad_";
  MultiTensor tensors(op, {{"params", params, true}, {"grads", grads, false}, {"state_sums", state_sums, true}});
  tensors.check_dtypes();
  const bool float_grads = tensors.dtype(1) == Dtype::Float32, float_states = tensors.dtype(2) == Dtype::Float32;
  const AdagradLoop loop = loops_for(op, all_adagrad_loops()).update(tensors.dtype(0), float_grads, float_states);
  const AdagradStep step{static_cast<float>(lr), static_cast<float>(eps), static_cast<float>(weight_decay)};
  run<3>(tensors, [&](void** at, size_t, int64_t count) { loop(at[0], at[1], at[2], count, step); });
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) { m.impl("adagrad_", DS_KERNELS_BOX(&adagrad_)); }

}  // namespace ds_kernels::cpu
