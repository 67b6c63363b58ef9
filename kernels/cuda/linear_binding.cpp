// The ops of <ds_kernels/ops/linear.h> for tensors on CUDA devices.
#include "linear_launch.h"

#include <ds_kernels/ops/linear.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

// From more inputs on torch's product is faster: int8 weights must be made floats for it, which takes five times the
// reading.
constexpr int64_t kFewInputs = 4, kFewInputsOfInt8 = 16;

struct Linear : Device {
  using Device::Device;

  bool takes(const LinearLayer& layer, Dtype) const {
    return layer.inputs <= (layer.scales ? kFewInputsOfInt8 : kFewInputs) && layer.columns < (int64_t{1} << 32);
  }

  void linear(const char* op, const LinearLayer& layer, Dtype dtype) const {
    launch_linear(op, layer, dtype, stream());
  }
  void finish(const char* op, const LinearLayer& layer, const void* sums, Dtype dtype) const {
    launch_linear_finish(op, layer, sums, dtype, stream());
  }
  void dequantize(const char* op, const QuantizedRows& rows, Dtype dtype) const {
    launch_dequantize_weight(op, rows, dtype, stream());
  }

  int64_t rows_at_once(int64_t rows, int64_t, Dtype) const { return rows; }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { LinearOps<Linear>::implement(m); }

}  // namespace ds_kernels::cuda
