// ds_plugin::adam_ and ds_plugin::adam_rollback_, on any device.
#pragma once

#include <ds_kernels/adam.h>
#include <ds_kernels/multi_tensor.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for AdamLists.
template <class Device>
struct AdamOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("adam_", DS_KERNELS_BOX(&adam_));
    m.impl("adam_rollback_", DS_KERNELS_BOX(&adam_rollback_));
  }

  static void adam_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                    const TensorList& exp_avg_sqs, const std::vector<int64_t>& steps, double lr, double beta1,
                    double beta2, double eps, double weight_decay, bool adamw, bool bias_correction) {
    MultiTensor tensors = checked("adam_", params, grads, exp_avgs, exp_avg_sqs);
    const AdamOptions options{lr, beta1, beta2, eps, weight_decay, adamw, bias_correction};
    run(params, tensors, steps, options, false);
  }

  static void adam_rollback_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                             const TensorList& exp_avg_sqs, const std::vector<int64_t>& steps, double lr, double beta1,
                             double beta2, double eps, double weight_decay) {
    MultiTensor tensors = checked("adam_rollback_", params, grads, exp_avgs, exp_avg_sqs);
    DS_KERNELS_CHECK(tensors.dtype(0) == Dtype::Float32, tensors.op(), "params are ", name_of(tensors.dtype(0)),
                     "; expected float32: a step that was rounded to fewer bits cannot be undone");
    const AdamOptions options{lr, beta1, beta2, eps, weight_decay, true, true};
    run(params, tensors, steps, options, true);
  }

 private:
  static MultiTensor checked(const char* op, const TensorList& params, const TensorList& grads,
                             const TensorList& exp_avgs, const TensorList& exp_avg_sqs) {
    MultiTensor tensors(op, {{"params", params, true},
                             {"grads", grads, false},
                             {"exp_avgs", exp_avgs, true},
                             {"exp_avg_sqs", exp_avg_sqs, true}});
    tensors.check_dtypes();
    return tensors;
  }

  static void run(const TensorList& params, MultiTensor& tensors, const std::vector<int64_t>& steps,
                  const AdamOptions& options, bool rollback) {
    const auto constants =
        steps_of(tensors.op(), steps, tensors.size(), [&](int64_t step) { return adam_step(options, step); });
    if (tensors.size() == 0) return;
    const Device device(params[0].device_index());
    device.run(tensors.op(), AdamLists{tensors.tensors(), steps_for(constants), rollback}, tensors.dtype(0));
    tensors.write_back();
  }
};

}  // namespace ds_kernels
