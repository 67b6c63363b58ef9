// The ops of <ds_kernels/ops/evoformer_attn.h> for tensors on CUDA devices.
#include <ds_kernels/ops/evoformer_attn.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

struct EvoformerDevice : Device {
  using Device::Device;
  // A thread holds a query in registers. DeepSpeed's own op has the same limit.
  static bool takes(const EvoformerShape& shape) { return shape.head_dim <= 64; }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { EvoformerOps<EvoformerDevice>::implement(m); }

}  // namespace ds_kernels::cuda
