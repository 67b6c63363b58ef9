// Adagrad over many tensors, without torch.
#include "adagrad_launch.h"
#include "multi_tensor.cuh"

namespace ds_kernels::cuda {
namespace {

struct AdagradUpdate : SameForAll<AdagradStep> {
  static constexpr bool written[] = {true, false, true};

  static __device__ __forceinline__ void run(const AdagradStep& step, float& p, float g, float& sum) {
    ds_kernels::adagrad_update(p, g, sum, step);
  }
};

}  // namespace

void adagrad_update(const TensorLists& tensors, Dtype params, bool float_grads, bool float_states,
                    const AdagradStep& step, Stream stream) {
  with_types(params, float_grads, float_states, [&](auto param, auto grad, auto state) {
    multi_tensor<AdagradUpdate, decltype(param), decltype(grad), decltype(state)>("adagrad_", tensors, step, Nothing{},
                                                                                  stream);
  });
}

}  // namespace ds_kernels::cuda
