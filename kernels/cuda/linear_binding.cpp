// The ops of <ds_kernels/ops/linear.h> for tensors on CUDA devices.
#include <ds_kernels/ops/linear.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

// From more inputs on torch's product is faster: int8 weights must be made floats for it, which takes five times the
// reading.
constexpr int64_t kFewInputs = 4, kFewInputsOfInt8 = 16;

struct Linear : Device {
  using Device::Device;

  // int4 weights are made floats for any number of inputs.
  bool takes(const LinearLayer& layer, Dtype) const {
    return !layer.int4 && layer.inputs <= (layer.scales ? kFewInputsOfInt8 : kFewInputs) &&
           layer.columns < (int64_t{1} << 32);
  }

  bool widens(Dtype) const { return false; }

  int64_t rows_at_once(int64_t rows, int64_t, Dtype) const { return rows; }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { LinearOps<Linear>::implement(m); }

}  // namespace ds_kernels::cuda
