// The ops of <ds_kernels/ops/activation.h> for tensors on CUDA devices.
#include "activation_launch.h"

#include <ds_kernels/ops/activation.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

struct Activations : Device {
  using Device::Device;

  void bias_activation(const char*, const ActivationRows& rows, Activation activation, Dtype dtype) const {
    launch_bias_activation(rows, dtype, activation, stream());
  }
  void gated_activation(const char*, const ActivationRows& rows, Activation activation, Dtype dtype) const {
    launch_gated_activation(rows, dtype, activation, stream());
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { ActivationOps<Activations>::implement(m); }

}  // namespace ds_kernels::cuda
