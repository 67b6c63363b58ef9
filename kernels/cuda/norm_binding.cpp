// ds_plugin::layer_norm, rms_norm and their variants with a residual, for tensors on CUDA devices.
#include "norm_launch.h"

#include <tuple>

#include <ds_kernels/arguments.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

struct Norm {
  const char* op;
  void (*launcher)(const NormRows&, Dtype, Stream);
  const Tensor& input;
  const Tensor* residual;
  const OptionalTensor& input_bias;
  const Tensor& weight;
  const Tensor* bias;
  double eps;
};

// Writes the normalised rows to a new tensor, and the sums to `sum` unless it is null.
Tensor run(const Norm& norm, Tensor* sum) {
  const Device device(TensorRef(norm.input.get()).device_index());
  Arguments arguments(norm.op, "input", norm.input);
  const int64_t rows = rows_of(norm.op, "input", norm.input);
  const Shape shape = norm.input.sizes();
  const int64_t& columns = shape[shape.size() - 1];
  NormRows n{};
  n.input = arguments.read("input", norm.input, shape);
  if (norm.residual) n.residual = arguments.read("residual", *norm.residual, shape);
  n.input_bias = arguments.read("input_bias", norm.input_bias, vector_of(columns));
  n.weight = arguments.read("weight", norm.weight, vector_of(columns));
  if (norm.bias) n.bias = arguments.read("bias", *norm.bias, vector_of(columns));
  n.rows = rows;
  n.columns = columns;
  n.eps = static_cast<float>(norm.eps);
  Tensor output = new_tensor(norm.input, shape);
  n.output = output.data_ptr();
  if (sum) {
    *sum = new_tensor(norm.input, shape);
    n.sum = sum->data_ptr();
  }
  norm.launcher(n, arguments.dtype(), device.stream());
  return output;
}

Tensor layer_norm(const Tensor& input, const Tensor& weight, const Tensor& bias, double eps) {
  return run({"layer_norm", &launch_layer_norm, input, nullptr, {}, weight, &bias, eps}, nullptr);
}

Tensor post_layer_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& input_bias,
                       const Tensor& weight, const Tensor& bias, double eps) {
  return run({"post_layer_norm", &launch_layer_norm, input, &residual, input_bias, weight, &bias, eps}, nullptr);
}

std::tuple<Tensor, Tensor> pre_layer_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& input_bias,
                                          const Tensor& weight, const Tensor& bias, double eps) {
  Tensor sum;
  Tensor output = run({"pre_layer_norm", &launch_layer_norm, input, &residual, input_bias, weight, &bias, eps}, &sum);
  return {output, sum};
}

Tensor rms_norm(const Tensor& input, const Tensor& weight, double eps) {
  return run({"rms_norm", &launch_rms_norm, input, nullptr, {}, weight, nullptr, eps}, nullptr);
}

std::tuple<Tensor, Tensor> pre_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight, double eps) {
  Tensor sum;
  Tensor output = run({"pre_rms_norm", &launch_rms_norm, input, &residual, {}, weight, nullptr, eps}, &sum);
  return {output, sum};
}

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) {
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("post_layer_norm", TORCH_BOX(&post_layer_norm));
  m.impl("pre_layer_norm", TORCH_BOX(&pre_layer_norm));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("pre_rms_norm", TORCH_BOX(&pre_rms_norm));
}

}  // namespace ds_kernels::cuda
