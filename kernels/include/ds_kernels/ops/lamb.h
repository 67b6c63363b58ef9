// ds_plugin::lamb_, on any device.
#pragma once

#include <ds_kernels/arguments.h>
#include <ds_kernels/lamb.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for LambLists.
template <class Device>
struct LambOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("lamb_", DS_KERNELS_BOX(&lamb_));
  }

  static Tensor lamb_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                      const TensorList& exp_avg_sqs, const TensorList& copies, const std::vector<int64_t>& steps,
                      double lr, double beta1, double beta2, double eps, double weight_decay, double min_coeff,
                      double max_coeff, double grad_scale, bool eps_inside_sqrt, bool bias_correction,
                      bool correct_inside) {
    MultiTensor tensors = checked(params, grads, exp_avgs, exp_avg_sqs, copies);
    const LambOptions options{lr,         beta1,      beta2,           eps,             weight_decay,  min_coeff,
                              max_coeff,  grad_scale, eps_inside_sqrt, bias_correction, correct_inside};
    const auto constants =
        steps_of(tensors.op(), steps, tensors.size(), [&](int64_t step) { return lamb_step(options, step); });
    const Tensor ratios = new_ratios(params);
    if (tensors.size() == 0) return ratios;
    const Device device(params[0].device_index());
    const LambLists work{tensors.tensors(), steps_for(constants), static_cast<float*>(ratios.data_ptr())};
    device.run(tensors.op(), work, tensors.dtype(kParams));
    tensors.write_back();
    return ratios;
  }

 private:
  static MultiTensor checked(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                             const TensorList& exp_avg_sqs, const TensorList& copies) {
    const char* op = "lamb_";
    const ListArgument p{"params", params, true}, g{"grads", grads, false}, m{"exp_avgs", exp_avgs, true},
        v{"exp_avg_sqs", exp_avg_sqs, true}, c{"copies", copies, true};
    MultiTensor tensors = copies.size() == 0 ? MultiTensor(op, {p, g, m, v}) : MultiTensor(op, {p, g, m, v, c});
    tensors.check_dtypes(2, true);
    return tensors;
  }

  // On the tensors' device; of no tensors, on the CPU: there is nothing to compute, and nowhere to do it.
  static Tensor new_ratios(const TensorList& tensors) {
    const auto size = static_cast<int64_t>(tensors.size());
    const int32_t type = size ? tensors[0].device_type() : aoti_torch_device_type_cpu();
    return new_tensor(vector_of(size), aoti_torch_dtype_float32(), type, size ? tensors[0].device_index() : 0);
  }
};

}  // namespace ds_kernels
