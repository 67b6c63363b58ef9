// The ops of <ds_kernels/ops/spatial.h> for tensors on CUDA devices.
#include "spatial_launch.h"

#include <ds_kernels/ops/spatial.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

struct Spatial : Device {
  using Device::Device;

  void add_bias(const char* op, const BiasRows& rows, Dtype dtype) const {
    launch_bias_add(op, rows, dtype, stream());
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { SpatialOps<Spatial>::implement(m); }

}  // namespace ds_kernels::cuda
