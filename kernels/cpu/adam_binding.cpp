// ds_plugin::adam_ and ds_plugin::adam_rollback_ for tensors in host memory.
#include "adam_loops.h"
#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(AdamLoops, adam_loops)

namespace {

void run_loop(AdamLoop loop, MultiTensor& tensors, const std::vector<AdamStep>& steps) {
  run<4>(tensors, [&](void** at, size_t tensor, int64_t count) {
    loop(at[0], at[1], at[2], at[3], count, steps[steps.size() == 1 ? 0 : tensor]);
  });
}

void adam_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
           const std::vector<int64_t>& steps, double lr, double beta1, double beta2, double eps, double weight_decay,
           bool adamw, bool bias_correction) {
  const char* op = "adam_";
  MultiTensor tensors(op, {{"params", params, true},
                           {"grads", grads, false},
                           {"exp_avgs", exp_avgs, true},
                           {"exp_avg_sqs", exp_avg_sqs, true}});
  tensors.check_dtypes();
  const AdamOptions options{lr, beta1, beta2, eps, weight_decay, adamw, bias_correction};
  const auto constants = steps_of(op, steps, tensors.size(), [&](int64_t step) { return adam_step(options, step); });
  const bool float_grads = tensors.dtype(1) == Dtype::Float32, float_states = tensors.dtype(2) == Dtype::Float32;
  run_loop(loops_for(op, all_adam_loops()).update(tensors.dtype(0), float_grads, float_states), tensors, constants);
}

void adam_rollback_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                    const TensorList& exp_avg_sqs, const std::vector<int64_t>& steps, double lr, double beta1,
                    double beta2, double eps, double weight_decay) {
  const char* op = "adam_rollback_";
  MultiTensor tensors(op, {{"params", params, true},
                           {"grads", grads, false},
                           {"exp_avgs", exp_avgs, true},
                           {"exp_avg_sqs", exp_avg_sqs, true}});
  tensors.check_dtypes();
  DS_KERNELS_CHECK(tensors.dtype(0) == Dtype::Float32, op, "params are ", name_of(tensors.dtype(0)),
                   "; expected float32: a step that was rounded to fewer bits cannot be undone");
  const AdamOptions options{lr, beta1, beta2, eps, weight_decay, true, true};
  run_loop(loops_for(op, all_adam_loops()).rollback, tensors,
           steps_of(op, steps, tensors.size(), [&](int64_t step) { return adam_step(options, step); }));
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) {
  m.impl("adam_", DS_KERNELS_BOX(&adam_));
  m.impl("adam_rollback_", DS_KERNELS_BOX(&adam_rollback_));
}

}  // namespace ds_kernels::cpu
