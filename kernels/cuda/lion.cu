// Lion over many tensors, without torch.
#include <ds_kernels/lion.h>

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

template <>
void compute(const LionLists& lion, Dtype, const Stream& stream) {
  with_types(lion.tensors, [&](auto param, auto grad, auto state) {
    multi_tensor<LionUpdate, decltype(param), decltype(grad), decltype(state)>(stream, lion.tensors, lion.step,
                                                                              Nothing{});
  });
}

}  // namespace ds_kernels::cuda
