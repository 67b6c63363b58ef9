// ds_plugin::lion_, on any device.
#pragma once

#include <ds_kernels/lion.h>
#include <ds_kernels/multi_tensor.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for LionLists.
template <class Device>
struct LionOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("lion_", DS_KERNELS_BOX(&lion_));
  }

  static void lion_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs, double lr,
                    double beta1, double beta2, double weight_decay) {
    MultiTensor tensors("lion_", {{"params", params, true}, {"grads", grads, false}, {"exp_avgs", exp_avgs, true}});
    tensors.check_dtypes();
    if (tensors.size() == 0) return;
    const Device device(params[0].device_index());
    const LionStep step = lion_step(lr, beta1, beta2, weight_decay);
    device.run(tensors.op(), LionLists{tensors.tensors(), step}, tensors.dtype(0));
    tensors.write_back();
  }
};

}  // namespace ds_kernels
