// The ops of <ds_kernels/ops/transformer.h> for tensors on CUDA devices.
#include "transformer_launch.h"

#include <ds_kernels/ops/transformer.h>

#include "device.h"
#include "new_tensors.h"

namespace ds_kernels::cuda {
namespace {

struct Transformer : Device {
  using Device::Device;

  void dropout_add(const char* op, const SumRows& rows, Dtype dtype) const {
    launch_dropout_add(op, rows, dtype, stream());
  }
  void dropout_add_backward(const char* op, const DropoutGradRows& rows, Dtype dtype) const {
    const Room parts(*this, rows.sums ? column_parts(rows.rows) * rows.columns : 0);
    launch_dropout_add_backward(op, rows, parts.data(), dtype, stream());
  }
  void training_norm(const char* op, const TrainingNormRows& rows, Dtype dtype) const {
    launch_training_norm(op, rows, dtype, stream());
  }
  void training_norm_backward(const char* op, const NormGradRows& rows, Dtype dtype) const {
    const Room means(*this, 2 * rows.rows), parts(*this, column_parts(rows.rows) * kNormSums * rows.columns);
    launch_training_norm_backward(op, rows, means.data(), parts.data(), dtype, stream());
  }
  void bias_gelu(const char* op, const GeluRows& rows, Dtype dtype) const {
    launch_bias_gelu(op, rows, dtype, stream());
  }
  void bias_gelu_backward(const char* op, const GeluGradRows& rows, Dtype dtype) const {
    const Room parts(*this, rows.sums ? column_parts(rows.rows) * rows.columns : 0);
    launch_bias_gelu_backward(op, rows, parts.data(), dtype, stream());
  }
  void masked_softmax(const char* op, const MaskedSoftmaxRows& rows, Dtype dtype) const {
    launch_masked_softmax(op, rows, dtype, stream());
  }
  void masked_softmax_backward(const char* op, const SoftmaxGradRows& rows, Dtype dtype) const {
    launch_masked_softmax_backward(op, rows, dtype, stream());
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { TransformerOps<Transformer>::implement(m); }

}  // namespace ds_kernels::cuda
