// ds_plugin::lion_ for tensors on CUDA devices.
#include "lion_launch.h"
#include "run.h"

namespace ds_kernels::cuda {
namespace {

void lion_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs, double lr, double beta1,
           double beta2, double weight_decay) {
  const char* op = "lion_";
  MultiTensor tensors(op, {{"params", params, true}, {"grads", grads, false}, {"exp_avgs", exp_avgs, true}});
  tensors.check_dtypes();
  const bool float_grads = tensors.dtype(1) == Dtype::Float32, float_states = tensors.dtype(2) == Dtype::Float32;
  const LionStep step = lion_step(lr, beta1, beta2, weight_decay);
  run(tensors, params, [&](const TensorLists& lists, Stream stream) {
    lion_update(lists, tensors.dtype(0), float_grads, float_states, step, stream);
  });
}

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { m.impl("lion_", DS_KERNELS_BOX(&lion_)); }

}  // namespace ds_kernels::cuda
