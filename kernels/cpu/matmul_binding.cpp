// The op of <ds_kernels/ops/matmul.h> for tensors in host memory.
#include <ds_kernels/ops/matmul.h>

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>

#include "device.h"

namespace ds_kernels::cpu {
namespace {

struct MatmulDevice : Device {
  using Device::Device;
  static constexpr int64_t kLeastSide = 40;  // of thin matrices more is laid out than is multiplied

  bool takes(const Matmul& m) const {
    static const bool is_faster = multiply_floats_faster(all_compute<Matmul>());
    return is_faster && std::min({m.rows, m.columns, m.depth}) >= kLeastSide;
  }

  void add_by_torch(const Tensor& sums, const Tensor& a, const Tensor& b, double beta) const {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(sums.get(), sums.get(), a.get(), b.get(), beta, 1));
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { MatmulOps<MatmulDevice>::implement(m); }

}  // namespace ds_kernels::cpu
