// The ops of <ds_kernels/ops/adagrad.h> for tensors on CUDA devices.
#include "adagrad_launch.h"

#include <ds_kernels/ops/adagrad.h>

#include "device.h"
#include "lists_of.h"

namespace ds_kernels::cuda {
namespace {

struct Adagrad : Device {
  using Device::Device;

  void update(const MultiTensor& tensors, const AdagradStep& step) const {
    adagrad_update(lists_of(tensors), tensors.dtype(0), tensors.is_float(1), tensors.is_float(2), step, stream());
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { AdagradOps<Adagrad>::implement(m); }

}  // namespace ds_kernels::cuda
