// The ops of <ds_kernels/ops/linear.h> for tensors on CUDA devices.
#include <ds_kernels/ops/linear.h>

#include "device.h"
#include "linear_tiles.h"

namespace ds_kernels::cuda {
namespace {

// From more inputs on torch's product is faster: quantized weights must be made floats for it, which takes five times
// the reading of int8 weights and nine times that of int4. On tensor cores each weight is read once for all of
// kMostInputsOfTiles.
constexpr int64_t kFewInputs = 4, kFewInputsOfQuantized = 16;

struct Linear : Device {
  using Device::Device;

  bool takes(const LinearLayer& layer, Dtype dtype) const {
    return layer.inputs <= most_inputs(layer, dtype) && layer.columns < (int64_t{1} << 32);
  }

  bool widens(const LinearLayer&, Dtype) const { return false; }

  int64_t rows_at_once(int64_t rows, int64_t, Dtype) const { return rows; }

 private:
  static int64_t most_inputs(const LinearLayer& layer, Dtype dtype) {
    if (!layer.scales) return kFewInputs;
    return fits_tiles(layer, dtype) ? kMostInputsOfTiles : kFewInputsOfQuantized;
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { LinearOps<Linear>::implement(m); }

}  // namespace ds_kernels::cuda
