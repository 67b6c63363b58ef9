// Adam over many tensors, without torch.
#include <ds_kernels/adam.h>

#include "multi_tensor.cuh"

namespace ds_kernels::cuda {
namespace {

// What differs between tensors whose step numbers differ.
struct BiasCorrection {
  float step_size, inverse_root;
};

struct Adam {
  static constexpr bool written[] = {true, false, true, true};

  static __device__ __forceinline__ AdamStep constants(AdamStep common, BiasCorrection own) {
    common.step_size = own.step_size;
    common.inverse_root = own.inverse_root;
    return common;
  }
};

struct AdamUpdate : Adam {
  static __device__ __forceinline__ void run(const AdamStep& step, float& p, float g, float& m, float& v) {
    ds_kernels::adam_update(p, g, m, v, step);
  }
};

struct AdamRollback : Adam {
  static __device__ __forceinline__ void run(const AdamStep& step, float& p, float g, float& m, float& v) {
    ds_kernels::adam_rollback(p, g, m, v, step);
  }
};

struct CorrectionOf {
  Steps<AdamStep> steps;

  BiasCorrection operator()(size_t tensor) const {
    const AdamStep& step = steps.of(tensor);
    return {step.step_size, step.inverse_root};
  }
};

}  // namespace

template <>
void compute(const AdamLists& adam, Dtype, const Stream& stream) {
  const TensorLists& tensors = adam.tensors;
  const AdamStep& common = adam.steps.of(0);
  const CorrectionOf own{adam.steps};
  if (adam.rollback) return multi_tensor<AdamRollback, float, float, float, float>(stream, tensors, common, own);
  with_types(tensors, [&](auto param, auto grad, auto state) {
    using State = decltype(state);
    multi_tensor<AdamUpdate, decltype(param), decltype(grad), State, State>(stream, tensors, common, own);
  });
}

}  // namespace ds_kernels::cuda
