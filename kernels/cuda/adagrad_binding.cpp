// ds_plugin::adagrad_ for tensors on CUDA devices.
#include "adagrad_launch.h"
#include "run.h"

namespace ds_kernels::cuda {
namespace {

void adagrad_(const TensorList& params, const TensorList& grads, const TensorList& state_sums, double lr, double eps,
              double weight_decay) {
  const char* op = "adagrad_";
  MultiTensor tensors(op, {{"params", params, true}, {"grads", grads, false}, {"state_sums", state_sums, true}});
  tensors.check_dtypes();
  const bool float_grads = tensors.dtype(1) == Dtype::Float32, float_states = tensors.dtype(2) == Dtype::Float32;
  const AdagradStep step{static_cast<float>(lr), static_cast<float>(eps), static_cast<float>(weight_decay)};
  run(tensors, params, [&](const TensorLists& lists, Stream stream) {
    adagrad_update(lists, tensors.dtype(0), float_grads, float_states, step, stream);
  });
}

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { m.impl("adagrad_", DS_KERNELS_BOX(&adagrad_)); }

}  // namespace ds_kernels::cuda
