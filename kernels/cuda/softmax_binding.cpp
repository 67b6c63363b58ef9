// The ops of <ds_kernels/ops/softmax.h> for tensors on CUDA devices.
#include "softmax_launch.h"

#include <ds_kernels/ops/softmax.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

struct Softmax : Device {
  using Device::Device;

  void softmax(const char* op, const Scores& scores, Dtype dtype) const {
    launch_softmax(op, scores, dtype, stream());
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { SoftmaxOps<Softmax>::implement(m); }

}  // namespace ds_kernels::cuda
