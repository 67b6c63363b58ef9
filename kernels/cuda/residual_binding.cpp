// The ops of <ds_kernels/ops/residual.h> for tensors on CUDA devices.
#include "residual_launch.h"

#include <ds_kernels/ops/residual.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

struct Residuals : Device {
  using Device::Device;

  void add_bias(const char*, const ResidualRows& rows, Dtype dtype) const { launch_add_bias(rows, dtype, stream()); }
  void mix(const char*, const MixRows& rows, Dtype dtype) const { launch_mix(rows, dtype, stream()); }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { ResidualOps<Residuals>::implement(m); }

}  // namespace ds_kernels::cuda
