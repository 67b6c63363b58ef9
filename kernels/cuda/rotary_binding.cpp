// The ops of <ds_kernels/ops/rotary.h> for tensors on CUDA devices.
#include "rotary_launch.h"

#include <ds_kernels/ops/rotary.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

struct Rotary : Device {
  using Device::Device;

  void rotary(const char* op, const Rotation& rotation, Dtype dtype) const {
    launch_rotary(op, rotation, dtype, stream());
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { RotaryOps<Rotary>::implement(m); }

}  // namespace ds_kernels::cuda
