// The ops of <ds_kernels/ops/norm.h> for tensors on CUDA devices.
#include "norm_launch.h"

#include <ds_kernels/ops/norm.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

struct Norms : Device {
  using Device::Device;

  void layer_norm(const char*, const NormRows& rows, Dtype dtype) const { launch_layer_norm(rows, dtype, stream()); }
  void rms_norm(const char*, const NormRows& rows, Dtype dtype) const { launch_rms_norm(rows, dtype, stream()); }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { NormOps<Norms>::implement(m); }

}  // namespace ds_kernels::cuda
