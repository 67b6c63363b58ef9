// ds_plugin::layer_norm, rms_norm and their variants with a residual, on any device.
#pragma once

#include <tuple>

#include <ds_kernels/arguments.h>
#include <ds_kernels/norm.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for NormRows.
template <class Device>
struct NormOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("layer_norm", TORCH_BOX(&layer_norm));
    m.impl("post_layer_norm", TORCH_BOX(&post_layer_norm));
    m.impl("pre_layer_norm", TORCH_BOX(&pre_layer_norm));
    m.impl("rms_norm", TORCH_BOX(&rms_norm));
    m.impl("pre_rms_norm", TORCH_BOX(&pre_rms_norm));
  }

  static Tensor layer_norm(const Tensor& input, const Tensor& weight, const Tensor& bias, double eps) {
    return run({"layer_norm", true, input, nullptr, {}, weight, &bias, eps}, nullptr);
  }

  static Tensor post_layer_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& input_bias,
                                const Tensor& weight, const Tensor& bias, double eps) {
    return run({"post_layer_norm", true, input, &residual, input_bias, weight, &bias, eps}, nullptr);
  }

  static std::tuple<Tensor, Tensor> pre_layer_norm(const Tensor& input, const Tensor& residual,
                                                   const OptionalTensor& input_bias, const Tensor& weight,
                                                   const Tensor& bias, double eps) {
    Tensor sum;
    const Norm norm{"pre_layer_norm", true, input, &residual, input_bias, weight, &bias, eps};
    Tensor output = run(norm, &sum);
    return {output, sum};
  }

  static Tensor rms_norm(const Tensor& input, const Tensor& weight, double eps, double weight_offset) {
    return run({"rms_norm", false, input, nullptr, {}, weight, nullptr, eps, weight_offset}, nullptr);
  }

  static std::tuple<Tensor, Tensor> pre_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                                                 double eps) {
    Tensor sum;
    Tensor output = run({"pre_rms_norm", false, input, &residual, {}, weight, nullptr, eps}, &sum);
    return {output, sum};
  }

 private:
  struct Norm {
    const char* op;
    bool centred;
    const Tensor& input;
    const Tensor* residual;
    const OptionalTensor& input_bias;
    const Tensor& weight;
    const Tensor* bias;
    double eps, weight_offset = 0;
  };

  // Writes the normalised rows to a new tensor, and the sums to `sum` unless it is null.
  static Tensor run(const Norm& norm, Tensor* sum) {
    Arguments arguments(norm.op, "input", norm.input);
    const Device device(arguments.device_index());
    const Shape shape = norm.input.sizes();
    NormRows n{};
    n.rows = rows_of(norm.op, "input", norm.input);
    n.columns = shape[shape.size() - 1];
    n.input = arguments.read("input", norm.input, shape);
    if (norm.residual) n.residual = arguments.read("residual", *norm.residual, shape);
    n.input_bias = arguments.read("input_bias", norm.input_bias, vector_of(n.columns));
    n.weight = arguments.read("weight", norm.weight, vector_of(n.columns));
    if (norm.bias) n.bias = arguments.read("bias", *norm.bias, vector_of(n.columns));
    n.eps = static_cast<float>(norm.eps);
    n.weight_offset = static_cast<float>(norm.weight_offset);
    n.centred = norm.centred;
    Tensor output = new_tensor(norm.input, shape);
    n.output = output.data_ptr();
    if (sum) {
      *sum = new_tensor(norm.input, shape);
      n.sum = sum->data_ptr();
    }
    device.run(norm.op, n, arguments.dtype());
    return output;
  }
};

}  // namespace ds_kernels
