// The ops of <ds_kernels/ops/adam.h> for tensors on CUDA devices.
#include "adam_launch.h"

#include <ds_kernels/ops/adam.h>

#include "device.h"
#include "lists_of.h"

namespace ds_kernels::cuda {
namespace {

struct Adam : Device {
  using Device::Device;

  void update(const MultiTensor& tensors, const std::vector<AdamStep>& steps) const {
    adam_update(lists_of(tensors), tensors.dtype(0), tensors.is_float(1), tensors.is_float(2), steps, stream());
  }
  void rollback(const MultiTensor& tensors, const std::vector<AdamStep>& steps) const {
    adam_rollback(lists_of(tensors), steps, stream());
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { AdamOps<Adam>::implement(m); }

}  // namespace ds_kernels::cuda
