// ds_plugin::layer_norm, rms_norm and their variants with a residual, for tensors in host memory.
#include "norm_loops.h"

#include <tuple>

#include "arguments.h"
#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(NormLoops, norm_loops)

namespace {

struct Norm {
  const char* op;
  NormLoop (*NormLoops::*loop)(Dtype);
  const Tensor& input;
  const Tensor* residual;
  const OptionalTensor& input_bias;
  const Tensor& weight;
  const Tensor* bias;
  double eps;
};

// Writes the normalised rows to a new tensor, and the sums to `sum` unless it is null.
Tensor run(const Norm& norm, Tensor* sum) {
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
  n.columns = columns;
  n.eps = static_cast<float>(norm.eps);
  Tensor output = new_tensor(norm.input, shape);
  n.output = output.data_ptr();
  if (sum) {
    *sum = new_tensor(norm.input, shape);
    n.sum = sum->data_ptr();
  }
  const NormLoop loop = (loops_for(norm.op, all_norm_loops()).*norm.loop)(arguments.dtype());
  parallel_for(0, rows, row_grain(columns), [&](int64_t first, int64_t last) {
    std::vector<float> scratch(columns);
    loop(n, first, last, scratch.data());
  });
  return output;
}

Tensor layer_norm(const Tensor& input, const Tensor& weight, const Tensor& bias, double eps) {
  return run({"layer_norm", &NormLoops::layer_norm, input, nullptr, {}, weight, &bias, eps}, nullptr);
}

Tensor post_layer_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& input_bias,
                       const Tensor& weight, const Tensor& bias, double eps) {
  return run({"post_layer_norm", &NormLoops::layer_norm, input, &residual, input_bias, weight, &bias, eps}, nullptr);
}

std::tuple<Tensor, Tensor> pre_layer_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& input_bias,
                                          const Tensor& weight, const Tensor& bias, double eps) {
  Tensor sum;
  Tensor output = run({"pre_layer_norm", &NormLoops::layer_norm, input, &residual, input_bias, weight, &bias, eps}, &sum);
  return {output, sum};
}

Tensor rms_norm(const Tensor& input, const Tensor& weight, double eps) {
  return run({"rms_norm", &NormLoops::rms_norm, input, nullptr, {}, weight, nullptr, eps}, nullptr);
}

std::tuple<Tensor, Tensor> pre_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight, double eps) {
  Tensor sum;
  Tensor output = run({"pre_rms_norm", &NormLoops::rms_norm, input, &residual, {}, weight, nullptr, eps}, &sum);
  return {output, sum};
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) {
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("post_layer_norm", TORCH_BOX(&post_layer_norm));
  m.impl("pre_layer_norm", TORCH_BOX(&pre_layer_norm));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("pre_rms_norm", TORCH_BOX(&pre_rms_norm));
}

}  // namespace ds_kernels::cpu
