// The ops of <ds_kernels/ops/quantizer.h> for tensors on CUDA devices.
#include "quantizer_launch.h"

#include <ds_kernels/ops/quantizer.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

struct Quantizer : Device {
  using Device::Device;

  void quantize(const char* op, const QuantizeGroups& groups, Dtype dtype) const {
    launch_quantize(op, groups, dtype, stream());
  }
  void dequantize(const char* op, const DequantizeGroups& groups, Dtype dtype) const {
    launch_dequantize(op, groups, dtype, stream());
  }
  void reduce(const char* op, const ReduceGroups& groups) const { launch_quantized_reduce(op, groups, stream()); }
  void dequantize_range(const char* op, const DequantizeRangeGroups& groups, Dtype dtype) const {
    launch_dequantize_range(op, groups, dtype, stream());
  }
  void fake_quantize(const char* op, const FakeQuantizeGroups& groups, Dtype dtype) const {
    launch_fake_quantize(op, groups, dtype, stream());
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { QuantizerOps<Quantizer>::implement(m); }

}  // namespace ds_kernels::cuda
