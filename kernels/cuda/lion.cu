// Lion over many tensors, without torch.
#include "lion_launch.h"
#include "multi_tensor.cuh"

namespace ds_kernels::cuda {
namespace {

struct LionUpdate : SameForAll<LionStep> {
  static constexpr bool written[] = {true, false, true};

  static __device__ __forceinline__ void run(const LionStep& step, float& p, float g, float& m) {
    ds_kernels::lion_update(p, g, m, step);
  }
};

}  // namespace

void lion_update(const TensorLists& tensors, Dtype params, bool float_grads, bool float_states, const LionStep& step,
                 Stream stream) {
  with_types(params, float_grads, float_states, [&](auto param, auto grad, auto state) {
    multi_tensor<LionUpdate, decltype(param), decltype(grad), decltype(state)>("lion_", tensors, step, Nothing{},
                                                                              stream);
  });
}

}  // namespace ds_kernels::cuda
