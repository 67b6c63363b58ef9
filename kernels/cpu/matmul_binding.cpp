// The op of <ds_kernels/ops/matmul.h> for tensors in host memory.
#include <ds_kernels/ops/matmul.h>
#include <ds_kernels/vec.h>

#include "device.h"

namespace ds_kernels::cpu {
namespace {

// torch's product is MKL's, which uses AVX-512 on Intel's CPUs alone. Where AMD's multiply twice as much by it as by AVX2, that is
// half of what these loops do. ds_plugin_sdk/ops/_products.py has the same rule.
struct MatmulDevice : Device {
  using Device::Device;

  bool takes(const Matmul&) const { return is_zen5_or_later() && best_compute<Matmul>(); }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { MatmulOps<MatmulDevice>::implement(m); }

}  // namespace ds_kernels::cpu
