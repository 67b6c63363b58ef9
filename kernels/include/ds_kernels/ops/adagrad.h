// ds_plugin::adagrad_, on any device.
#pragma once

#include <ds_kernels/adagrad.h>
#include <ds_kernels/multi_tensor.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for AdagradLists.
template <class Device>
struct AdagradOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("adagrad_", DS_KERNELS_BOX(&adagrad_));
  }

  static void adagrad_(const TensorList& params, const TensorList& grads, const TensorList& state_sums, double lr,
                       double eps, double weight_decay) {
    MultiTensor tensors("adagrad_",
                        {{"params", params, true}, {"grads", grads, false}, {"state_sums", state_sums, true}});
    tensors.check_dtypes();
    if (tensors.size() == 0) return;
    const Device device(params[0].device_index());
    const AdagradStep step{static_cast<float>(lr), static_cast<float>(eps), static_cast<float>(weight_decay)};
    device.run(tensors.op(), AdagradLists{tensors.tensors(), step}, tensors.dtype(0));
    tensors.write_back();
  }
};

}  // namespace ds_kernels
