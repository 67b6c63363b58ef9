// Adam over many tensors, without torch.
#include "adam_launch.h"
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
  const std::vector<AdamStep>& steps;

  BiasCorrection operator()(size_t tensor) const {
    const AdamStep& step = steps[steps.size() == 1 ? 0 : tensor];
    return {step.step_size, step.inverse_root};
  }
};

}  // namespace

void adam_update(const TensorLists& tensors, Dtype params, bool float_grads, bool float_states,
                 const std::vector<AdamStep>& steps, Stream stream) {
  with_types(params, float_grads, float_states, [&](auto param, auto grad, auto state) {
    multi_tensor<AdamUpdate, decltype(param), decltype(grad), decltype(state), decltype(state)>(
        "adam_", tensors, steps[0], CorrectionOf{steps}, stream);
  });
}

void adam_rollback(const TensorLists& tensors, const std::vector<AdamStep>& steps, Stream stream) {
  multi_tensor<AdamRollback, float, float, float, float>("adam_rollback_", tensors, steps[0], CorrectionOf{steps},
                                                         stream);
}

}  // namespace ds_kernels::cuda
