// ds_plugin::dropout_add, dropout_add_layer_norm, add_rms_norm, fused_bias_gelu, activation_and_mul,
// masked_softmax_dropout and their derivatives, on any device.
#pragma once

#include <tuple>

#include <ds_kernels/ops/activation.h>
#include <ds_kernels/transformer.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for the structs ...Rows of transformer.h.
template <class Device>
struct TransformerOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("dropout_add", TORCH_BOX(&dropout_add));
    m.impl("dropout_add_backward", TORCH_BOX(&dropout_add_backward));
    m.impl("dropout_add_layer_norm", TORCH_BOX(&dropout_add_layer_norm));
    m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&dropout_add_layer_norm_backward));
    m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
    m.impl("add_rms_norm_backward", TORCH_BOX(&add_rms_norm_backward));
    m.impl("activation_and_mul", TORCH_BOX(&activation_and_mul));
    m.impl("activation_and_mul_backward", TORCH_BOX(&activation_and_mul_backward));
    m.impl("fused_bias_gelu", TORCH_BOX(&fused_bias_gelu));
    m.impl("fused_bias_gelu_backward", TORCH_BOX(&fused_bias_gelu_backward));
    m.impl("masked_softmax_dropout", TORCH_BOX(&masked_softmax_dropout));
    m.impl("masked_softmax_dropout_backward", TORCH_BOX(&masked_softmax_dropout_backward));
  }

  // ---- dropout and sum -------------------------------------------------------------------------------------------

  static Tensor dropout_add(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                            const OptionalTensor& seed, double p) {
    Call call("dropout_add", "input", input);
    SumRows s = sum_rows(call, input, bias, residual, seed, p);
    Tensor result = call.new_rows();
    s.sum = result.data_ptr();
    call.device.run(call.op(), s, call.dtype());
    return result;
  }

  static std::tuple<Tensor, Tensor> dropout_add_backward(const Tensor& grad_output, const OptionalTensor& seed,
                                                         double p, bool bias) {
    Call call("dropout_add_backward", "grad_output", grad_output);
    DropoutGradRows g{};
    g.grad_output = call.arguments.read("grad_output", grad_output, call.shape());
    g.rows = call.rows;
    g.columns = call.columns;
    g.dropout = call.dropout(seed, p);
    Tensor grad_input = call.new_rows();
    Tensor sums = call.new_row_if(bias);
    g.grad_input = grad_input.data_ptr();
    g.sums = bias ? sums.data_ptr() : nullptr;
    call.device.run(call.op(), g, call.dtype());
    return {grad_input, sums};
  }

  // ---- layer norm ------------------------------------------------------------------------------------------------

  static std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm(
      const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual, const Tensor& weight,
      const Tensor& norm_bias, const OptionalTensor& seed, double p, double eps) {
    Call call("dropout_add_layer_norm", "input", input);
    TrainingNormRows n{};
    n.sum = sum_rows(call, input, bias, residual, seed, p);
    n.weight = call.arguments.read("weight", weight, call.row());
    n.bias = call.arguments.read("norm_bias", norm_bias, call.row());
    n.eps = static_cast<float>(eps);
    const bool has_sum = bias || residual || p != 0;
    Tensor output = call.new_rows(), sum = call.new_rows_if(has_sum);
    Tensor mean = new_float_tensor(input, call.leading()), rstd = new_float_tensor(input, call.leading());
    n.sum.sum = has_sum ? sum.data_ptr() : nullptr;
    n.output = output.data_ptr();
    n.mean = static_cast<float*>(mean.data_ptr());
    n.rstd = static_cast<float*>(rstd.data_ptr());
    call.device.run(call.op(), n, call.dtype());
    return {output, sum, mean, rstd};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(
      const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& normed_rows, const OptionalTensor& mean,
      const Tensor& rstd, const Tensor& weight, const OptionalTensor& norm_bias, const OptionalTensor& seed, double p,
      bool bias) {
    const NoGrad guard;
    Call call("dropout_add_layer_norm_backward", "grad_output", grad_output);
    const Statistic means(call, "mean", mean), factors(call, "rstd", rstd);
    NormGradRows g{};
    g.grad_output = call.arguments.read("grad_output", grad_output, call.shape());
    g.grad_sum = call.arguments.read("grad_sum", grad_sum, call.shape());
    g.rows_in = call.arguments.read("rows", normed_rows, call.shape());
    g.mean = means.data();
    g.rstd = factors.data();
    g.weight = call.arguments.read("weight", weight, call.row());
    g.bias = call.arguments.read("norm_bias", norm_bias, call.row());
    DS_KERNELS_CHECK(mean || norm_bias, call.op(), "mean and norm_bias are missing; expected one of them");
    g.rows = call.rows;
    g.columns = call.columns;
    g.dropout = call.dropout(seed, p);
    const bool dropping = p != 0;
    Tensor grad_total = call.new_rows(), grad_input = call.new_rows_if(dropping);
    Tensor grad_weight = call.new_row(), grad_norm_bias = call.new_row(), grad_bias = call.new_row_if(bias);
    g.grad_total = grad_total.data_ptr();
    g.grad_input = dropping ? grad_input.data_ptr() : nullptr;
    g.weight_sums = grad_weight.data_ptr();
    g.bias_sums = grad_norm_bias.data_ptr();
    g.input_sums = bias ? grad_bias.data_ptr() : nullptr;
    call.device.run(call.op(), g, call.dtype());
    return {grad_total, grad_input, grad_weight, grad_norm_bias, grad_bias};
  }

  // ---- RMS norm --------------------------------------------------------------------------------------------------

  static std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& input, const OptionalTensor& residual,
                                                         const Tensor& weight, double eps) {
    Call call("add_rms_norm", "input", input);
    TrainingNormRows n{};
    n.rms = true;
    n.sum = sum_rows(call, input, {}, residual, {}, 0);
    n.weight = call.arguments.read("weight", weight, call.row());
    n.eps = static_cast<float>(eps);
    Tensor output = call.new_rows(), sum = call.new_rows_if(residual.has_value());
    Tensor rstd = new_float_tensor(input, call.leading());
    n.sum.sum = residual ? sum.data_ptr() : nullptr;
    n.output = output.data_ptr();
    n.rstd = static_cast<float*>(rstd.data_ptr());
    call.device.run(call.op(), n, call.dtype());
    return {output, sum, rstd};
  }

  static std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad_output, const OptionalTensor& grad_sum,
                                                          const Tensor& summed, const Tensor& rstd,
                                                          const Tensor& weight) {
    const NoGrad guard;
    Call call("add_rms_norm_backward", "grad_output", grad_output);
    const Statistic factors(call, "rstd", rstd);
    NormGradRows g{};
    g.rms = true;
    g.grad_output = call.arguments.read("grad_output", grad_output, call.shape());
    g.grad_sum = call.arguments.read("grad_sum", grad_sum, call.shape());
    g.rows_in = call.arguments.read("rows", summed, call.shape());
    g.rstd = factors.data();
    g.weight = call.arguments.read("weight", weight, call.row());
    g.rows = call.rows;
    g.columns = call.columns;
    Tensor grad_total = call.new_rows(), grad_weight = call.new_row();
    g.grad_total = grad_total.data_ptr();
    g.weight_sums = grad_weight.data_ptr();
    call.device.run(call.op(), g, call.dtype());
    return {grad_total, grad_weight};
  }

  // ---- gates -----------------------------------------------------------------------------------------------------

  static Tensor activation_and_mul(const Tensor& gate, const Tensor& up, int64_t activation) {
    Call call("activation_and_mul", "gate", gate);
    GateRows g{};
    g.gate = call.arguments.read("gate", gate, call.shape());
    g.up = call.arguments.read("up", up, call.shape());
    g.rows = call.rows;
    g.columns = call.columns;
    g.activation = activation_of(call.op(), activation);
    Tensor output = call.new_rows();
    g.output = output.data_ptr();
    call.device.run(call.op(), g, call.dtype());
    return output;
  }

  static std::tuple<Tensor, Tensor> activation_and_mul_backward(const Tensor& grad_output, const Tensor& gate,
                                                                const Tensor& up, int64_t activation) {
    Call call("activation_and_mul_backward", "grad_output", grad_output);
    GateGradRows g{};
    g.grad_output = call.arguments.read("grad_output", grad_output, call.shape());
    g.gate = call.arguments.read("gate", gate, call.shape());
    g.up = call.arguments.read("up", up, call.shape());
    g.rows = call.rows;
    g.columns = call.columns;
    g.activation = activation_of(call.op(), activation);
    Tensor grad_gate = call.new_rows(), grad_up = call.new_rows();
    g.grad_gate = grad_gate.data_ptr();
    g.grad_up = grad_up.data_ptr();
    call.device.run(call.op(), g, call.dtype());
    return {grad_gate, grad_up};
  }

  // ---- bias and gelu ---------------------------------------------------------------------------------------------

  static Tensor fused_bias_gelu(const Tensor& input, const OptionalTensor& bias, bool tanh) {
    Call call("fused_bias_gelu", "input", input);
    GeluRows g{};
    g.input = call.arguments.read("input", input, call.shape());
    g.bias = call.arguments.read("bias", bias, call.row());
    g.rows = call.rows;
    g.columns = call.columns;
    g.tanh = tanh;
    Tensor output = call.new_rows();
    g.output = output.data_ptr();
    call.device.run(call.op(), g, call.dtype());
    return output;
  }

  static std::tuple<Tensor, Tensor> fused_bias_gelu_backward(const Tensor& grad_output, const Tensor& input,
                                                             const OptionalTensor& bias, bool tanh) {
    Call call("fused_bias_gelu_backward", "grad_output", grad_output);
    GeluGradRows g{};
    g.grad_output = call.arguments.read("grad_output", grad_output, call.shape());
    g.input = call.arguments.read("input", input, call.shape());
    g.bias = call.arguments.read("bias", bias, call.row());
    g.rows = call.rows;
    g.columns = call.columns;
    g.tanh = tanh;
    Tensor grad_input = call.new_rows();
    Tensor sums = call.new_row_if(bias.has_value());
    g.grad_input = grad_input.data_ptr();
    g.sums = bias ? sums.data_ptr() : nullptr;
    call.device.run(call.op(), g, call.dtype());
    return {grad_input, sums};
  }

  // ---- softmax ---------------------------------------------------------------------------------------------------

  static std::tuple<Tensor, Tensor> masked_softmax_dropout(const Tensor& scores, const OptionalTensor& mask,
                                                           double scale, const OptionalTensor& seed, double p) {
    Call call("masked_softmax_dropout", "scores", scores);
    const int64_t leading = scores.dim() - 1;
    DS_KERNELS_CHECK(leading <= kLeadingDimensions, call.op(), "scores has ", scores.dim(),
                     " dimensions; expected at most ", int64_t{kLeadingDimensions + 1});
    MaskedSoftmaxRows s{};
    s.scores = call.arguments.read("scores", scores, call.shape());
    s.rows = call.rows;
    s.columns = call.columns;
    s.scale = static_cast<float>(scale);
    s.dropout = call.dropout(seed, p);
    for (int64_t d = 0; d < kLeadingDimensions; ++d) {
      const int64_t dimension = d - (kLeadingDimensions - leading);
      s.sizes[d] = dimension < 0 ? 1 : scores.size(dimension);
    }
    OptionalTensor laid_out = mask;
    if (laid_out) lay_out_mask(s, call.arguments, scores, *laid_out);
    const bool dropping = p != 0;
    Tensor output = call.new_rows(), probs = call.new_rows_if(dropping);
    s.output = output.data_ptr();
    s.probs = dropping ? probs.data_ptr() : nullptr;
    call.device.run(call.op(), s, call.dtype());
    return {output, probs};
  }

  static Tensor masked_softmax_dropout_backward(const Tensor& grad_output, const Tensor& probs, double scale,
                                                const OptionalTensor& seed, double p) {
    Call call("masked_softmax_dropout_backward", "grad_output", grad_output);
    SoftmaxGradRows g{};
    g.grad_output = call.arguments.read("grad_output", grad_output, call.shape());
    g.probs = call.arguments.read("probs", probs, call.shape());
    g.rows = call.rows;
    g.columns = call.columns;
    g.scale = static_cast<float>(scale);
    g.dropout = call.dropout(seed, p);
    Tensor grad_scores = call.new_rows();
    g.grad_scores = grad_scores.data_ptr();
    call.device.run(call.op(), g, call.dtype());
    return grad_scores;
  }

 private:
  // The call's first tensor, as [rows, columns]; its device is current.
  struct Call {
    Call(const char* op, const char* name, const Tensor& first)
        : first(first),
          arguments(op, name, first),
          device(arguments.device_index()),
          rows(rows_of(op, name, first)),
          columns(first.size(first.dim() - 1)) {}

    const char* op() const { return arguments.op(); }
    Dtype dtype() const { return arguments.dtype(); }
    Shape shape() const { return first.sizes(); }
    Shape row() const { return vector_of(columns); }
    Shape leading() const { return {shape().data(), shape().size() - 1}; }

    // Results: of the shape of the first tensor, or one row; without elements if they are not wanted.
    Tensor new_rows() const { return new_tensor(first, shape()); }
    Tensor new_rows_if(bool wanted) const { return wanted ? new_rows() : no_elements(first); }
    Tensor new_row() const { return new_tensor(first, row()); }
    Tensor new_row_if(bool wanted) const { return wanted ? new_row() : no_elements(first); }

    SeededDropout dropout(const OptionalTensor& seed, double p) const {
      DS_KERNELS_CHECK(p >= 0 && p < 1, op(), "p is ", std::to_string(p), "; expected at least 0 and less than 1");
      if (p == 0) return {};
      DS_KERNELS_CHECK(seed, op(), "seed is missing; expected one, since p is not 0");
      arguments.check_device("seed", *seed);
      const TensorRef ref(seed->get());
      DS_KERNELS_CHECK(ref.dtype_code() == aoti_torch_dtype_int64() && ref.numel() == 1, op(), "seed has ",
                       ref.numel(), " elements; expected int64, one element");
      return dropout_of(static_cast<const int64_t*>(ref.data()), p);
    }

    const Tensor& first;
    Arguments arguments;
    const Device device;
    const int64_t rows, columns;
  };

  // One float for each row of a call, or none.
  class Statistic {
   public:
    Statistic(const Call& call, const char* name, const OptionalTensor& tensor) {
      if (!tensor) return;
      call.arguments.check_device(name, *tensor);
      DS_KERNELS_CHECK(TensorRef(tensor->get()).dtype_code() == aoti_torch_dtype_float32() &&
                           tensor->sizes() == call.leading(),
                       call.op(), name, " has shape ", text_of(tensor->sizes()), "; expected float32 ",
                       text_of(call.leading()));
      tensor_ = torch::stable::contiguous(*tensor);
    }

    const float* data() const { return tensor_ ? static_cast<const float*>(tensor_->data_ptr()) : nullptr; }

   private:
    OptionalTensor tensor_;
  };

  static SumRows sum_rows(Call& call, const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                          const OptionalTensor& seed, double p) {
    SumRows s{};
    s.input = call.arguments.read("input", input, call.shape());
    s.bias = call.arguments.read("bias", bias, call.row());
    s.residual = call.arguments.read("residual", residual, call.shape());
    s.rows = call.rows;
    s.columns = call.columns;
    s.dropout = call.dropout(seed, p);
    return s;
  }

  // Where the rows of a mask that broadcasts to the scores begin. A copy of the mask takes its place if its rows are
  // not contiguous.
  static void lay_out_mask(MaskedSoftmaxRows& s, const Arguments& arguments, const Tensor& scores, Tensor& mask) {
    const char* op = arguments.op();
    const Shape shape = scores.sizes();
    const int64_t dims = mask.dim(), leading = scores.dim() - dims;
    bool fits = leading >= 0;
    for (int64_t d = 0; fits && d < dims; ++d) fits = mask.size(d) == 1 || mask.size(d) == shape[leading + d];
    arguments.check_device("mask", mask);
    DS_KERNELS_CHECK(fits && dtype_of(op, "mask", TensorRef(mask.get())) == arguments.dtype(), op, "mask has shape ",
                     text_of(mask.sizes()), "; expected the dtype of scores, and a shape that broadcasts to ",
                     text_of(shape));
    s.mask_is_one = dims == 0 || (mask.size(dims - 1) == 1 && s.columns != 1);
    if (dims > 0 && !s.mask_is_one && mask.stride(dims - 1) != 1) {
      const NoGrad guard;
      mask = torch::stable::contiguous(mask);
    }
    s.mask = mask.data_ptr();
    const int64_t offset = kLeadingDimensions - (scores.dim() - 1);
    for (int64_t d = 0; d + 1 < dims; ++d) {
      if (mask.size(d) != 1) s.mask_strides[offset + leading + d] = mask.stride(d);
    }
  }
};

}  // namespace ds_kernels
