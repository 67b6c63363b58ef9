// The ops of <ds_kernels/ops/evoformer_attn.h> for tensors in host memory.
#include <ds_kernels/ops/evoformer_attn.h>

#include "device.h"

namespace ds_kernels::cpu {
namespace {

struct EvoformerDevice : Device {
  using Device::Device;
  static bool takes(const EvoformerShape&) { return true; }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { EvoformerOps<EvoformerDevice>::implement(m); }

}  // namespace ds_kernels::cpu
