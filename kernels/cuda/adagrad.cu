// Adagrad over many tensors, without torch.
#include <ds_kernels/adagrad.h>

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

template <>
void compute(const AdagradLists& adagrad, Dtype, const Stream& stream) {
  with_types(adagrad.tensors, [&](auto param, auto grad, auto state) {
    multi_tensor<AdagradUpdate, decltype(param), decltype(grad), decltype(state)>(stream, adagrad.tensors, adagrad.step,
                                                                              Nothing{});
  });
}

}  // namespace ds_kernels::cuda
