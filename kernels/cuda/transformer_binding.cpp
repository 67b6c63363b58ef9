// ds_plugin::dropout_add, dropout_add_layer_norm, fused_bias_gelu, masked_softmax_dropout and their derivatives, for
// tensors on CUDA devices.
#include "transformer_launch.h"

#include <tuple>

#include <ds_kernels/philox.h>

#include "device.h"
#include "new_tensors.h"

namespace ds_kernels::cuda {
namespace {

// ---- what the ops have in common ---------------------------------------------------------------------------------

// The call's first tensor, as [rows, columns]; its device is current.
struct Call {
  Call(const char* op, const char* name, const Tensor& first)
      : device(TensorRef(first.get()).device_index()),
        arguments(op, name, first),
        rows(rows_of(op, name, first)),
        columns(first.sizes()[first.dim() - 1]) {}

  const char* op() const { return arguments.op(); }
  Dtype dtype() const { return arguments.dtype(); }
  Shape row() const { return vector_of(columns); }
  Stream stream() const { return device.stream(); }

  const Device device;
  Arguments arguments;
  const int64_t rows, columns;
};

SeededDropout dropout_of(const Call& call, const OptionalTensor& seed, double p) {
  const char* op = call.op();
  DS_KERNELS_CHECK(p >= 0 && p < 1, op, "p is ", std::to_string(p), "; expected at least 0 and less than 1");
  if (p == 0) return {};
  DS_KERNELS_CHECK(seed, op, "seed is missing; expected one, since p is not 0");
  call.arguments.check_device("seed", *seed);
  const TensorRef ref(seed->get());
  DS_KERNELS_CHECK(ref.dtype_code() == aoti_torch_dtype_int64() && ref.numel() == 1, op, "seed has ", ref.numel(),
                   " elements; expected int64, one element");
  const Dropout dropout = ds_kernels::dropout_of(0, p);  // the seed itself is read by the device
  return {static_cast<const int64_t*>(ref.data()), dropout.threshold, dropout.factor};
}

// Room for sums of columns. The parts go when this does: their memory is kept for the stream.
class Sums {
 public:
  Sums(const Call& call, const Tensor& like, std::initializer_list<bool> wanted) {
    const int64_t size = column_parts(call.rows) * static_cast<int64_t>(wanted.size()) * call.columns;
    bool any = false;
    size_t next = 0;
    for (const bool one : wanted) {
      totals_[next] = one ? new_tensor(like, call.row()) : no_elements(like);
      sums_.totals[next] = one ? totals_[next].data_ptr() : nullptr;
      any = any || one;
      ++next;
    }
    if (!any) return;
    parts_ = new_float_tensor(like, vector_of(size));
    sums_.parts = static_cast<float*>(parts_.data_ptr());
  }

  const ColumnSums& sums() const { return sums_; }
  const Tensor& operator[](size_t i) const { return totals_[i]; }

 private:
  ColumnSums sums_{};
  Tensor totals_[kMostSums], parts_;
};

// ---- dropout and sum ---------------------------------------------------------------------------------------------

SumRows sum_rows(Call& call, const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                 const OptionalTensor& seed, double p) {
  SumRows s{};
  s.input = call.arguments.read("input", input, input.sizes());
  s.bias = call.arguments.read("bias", bias, call.row());
  s.residual = call.arguments.read("residual", residual, input.sizes());
  s.rows = call.rows;
  s.columns = call.columns;
  s.dropout = dropout_of(call, seed, p);
  return s;
}

Tensor dropout_add(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                   const OptionalTensor& seed, double p) {
  Call call("dropout_add", "input", input);
  SumRows s = sum_rows(call, input, bias, residual, seed, p);
  Tensor result = new_tensor(input, input.sizes());
  s.sum = result.data_ptr();
  launch_dropout_add(call.op(), s, call.dtype(), call.stream());
  return result;
}

std::tuple<Tensor, Tensor> dropout_add_backward(const Tensor& grad_output, const OptionalTensor& seed, double p,
                                                bool bias) {
  Call call("dropout_add_backward", "grad_output", grad_output);
  DropoutGradRows g{};
  g.grad_output = call.arguments.read("grad_output", grad_output, grad_output.sizes());
  g.rows = call.rows;
  g.columns = call.columns;
  g.dropout = dropout_of(call, seed, p);
  Tensor grad_input = new_tensor(grad_output, grad_output.sizes());
  g.grad_input = grad_input.data_ptr();
  const Sums sums(call, grad_output, {bias});
  g.sums = sums.sums();
  launch_dropout_add_backward(call.op(), g, call.dtype(), call.stream());
  return {grad_input, sums[0]};
}

// ---- layer norm --------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm(const Tensor& input, const OptionalTensor& bias,
                                                                  const OptionalTensor& residual, const Tensor& weight,
                                                                  const Tensor& norm_bias, const OptionalTensor& seed,
                                                                  double p, double eps) {
  Call call("dropout_add_layer_norm", "input", input);
  TrainingNormRows n{};
  n.sum = sum_rows(call, input, bias, residual, seed, p);
  n.weight = call.arguments.read("weight", weight, call.row());
  n.bias = call.arguments.read("norm_bias", norm_bias, call.row());
  n.eps = static_cast<float>(eps);
  const Shape shape = input.sizes(), row_shape{shape.data(), shape.size() - 1};
  Tensor output = new_tensor(input, shape);
  Tensor mean = new_float_tensor(input, row_shape), rstd = new_float_tensor(input, row_shape);
  const bool plain = !bias && !residual && p == 0;
  Tensor sum = plain ? no_elements(input) : new_tensor(input, shape);
  n.sum.sum = plain ? nullptr : sum.data_ptr();
  n.output = output.data_ptr();
  n.mean = static_cast<float*>(mean.data_ptr());
  n.rstd = static_cast<float*>(rstd.data_ptr());
  launch_training_norm(call.op(), n, call.dtype(), call.stream());
  return {output, sum, mean, rstd};
}

// One float a row.
const float* statistic(const Call& call, const char* name, const Tensor& tensor, Shape shape,
                       std::vector<Tensor>& copies) {
  call.arguments.check_device(name, tensor);
  const TensorRef ref(tensor.get());
  DS_KERNELS_CHECK(ref.dtype_code() == aoti_torch_dtype_float32() && tensor.sizes() == shape, call.op(), name,
                   " has shape ", text_of(tensor.sizes()), "; expected float32 ", text_of(shape));
  copies.push_back(torch::stable::contiguous(tensor));
  return static_cast<const float*>(copies.back().data_ptr());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(
    const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& normed_rows, const OptionalTensor& mean,
    const Tensor& rstd, const Tensor& weight, const OptionalTensor& norm_bias, const OptionalTensor& seed, double p,
    bool bias) {
  const NoGrad guard;
  Call call("dropout_add_layer_norm_backward", "grad_output", grad_output);
  const Shape shape = grad_output.sizes(), row_shape{shape.data(), shape.size() - 1};
  std::vector<Tensor> copies;
  NormGradRows g{};
  g.grad_output = call.arguments.read("grad_output", grad_output, shape);
  g.grad_sum = call.arguments.read("grad_sum", grad_sum, shape);
  g.rows_in = call.arguments.read("rows", normed_rows, shape);
  g.mean = mean ? statistic(call, "mean", *mean, row_shape, copies) : nullptr;
  g.rstd = statistic(call, "rstd", rstd, row_shape, copies);
  g.weight = call.arguments.read("weight", weight, call.row());
  g.bias = call.arguments.read("norm_bias", norm_bias, call.row());
  DS_KERNELS_CHECK(mean || norm_bias, call.op(), "mean and norm_bias are missing; expected one of them");
  g.rows = call.rows;
  g.columns = call.columns;
  g.dropout = dropout_of(call, seed, p);
  Tensor grad_total = new_tensor(grad_output, shape);
  Tensor grad_input = p != 0 ? new_tensor(grad_output, shape) : no_elements(grad_output);
  g.grad_total = grad_total.data_ptr();
  g.grad_input = p != 0 ? grad_input.data_ptr() : nullptr;
  const int64_t means = 2 * call.rows;
  const Tensor room = new_float_tensor(grad_output, vector_of(means));
  g.means = static_cast<float*>(room.data_ptr());
  const Sums sums(call, grad_output, {true, true, bias});
  g.sums = sums.sums();
  launch_training_norm_backward(call.op(), g, call.dtype(), call.stream());
  return {grad_total, grad_input, sums[0], sums[1], sums[2]};
}

// ---- bias and gelu -----------------------------------------------------------------------------------------------

Tensor fused_bias_gelu(const Tensor& input, const OptionalTensor& bias, bool tanh) {
  Call call("fused_bias_gelu", "input", input);
  const void* from = call.arguments.read("input", input, input.sizes());
  const void* added = call.arguments.read("bias", bias, call.row());
  Tensor output = new_tensor(input, input.sizes());
  launch_bias_gelu(call.op(), {from, added, output.data_ptr(), call.rows, call.columns, tanh}, call.dtype(),
                   call.stream());
  return output;
}

std::tuple<Tensor, Tensor> fused_bias_gelu_backward(const Tensor& grad_output, const Tensor& input,
                                                    const OptionalTensor& bias, bool tanh) {
  Call call("fused_bias_gelu_backward", "grad_output", grad_output);
  GeluGradRows g{};
  g.grad_output = call.arguments.read("grad_output", grad_output, grad_output.sizes());
  g.input = call.arguments.read("input", input, grad_output.sizes());
  g.bias = call.arguments.read("bias", bias, call.row());
  g.rows = call.rows;
  g.columns = call.columns;
  g.tanh = tanh;
  Tensor grad_input = new_tensor(grad_output, grad_output.sizes());
  g.grad_input = grad_input.data_ptr();
  const Sums sums(call, grad_output, {bias.has_value()});
  g.sums = sums.sums();
  launch_bias_gelu_backward(call.op(), g, call.dtype(), call.stream());
  return {grad_input, sums[0]};
}

// ---- softmax -----------------------------------------------------------------------------------------------------

// Where the rows of a mask that broadcasts to the scores begin. A copy of the mask takes its place if its rows are not
// contiguous.
void lay_out_mask(MaskedSoftmaxRows& s, const Arguments& arguments, const Tensor& scores, Tensor& mask) {
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

std::tuple<Tensor, Tensor> masked_softmax_dropout(const Tensor& scores, const OptionalTensor& mask, double scale,
                                                  const OptionalTensor& seed, double p) {
  Call call("masked_softmax_dropout", "scores", scores);
  DS_KERNELS_CHECK(scores.dim() <= kLeadingDimensions + 1, call.op(), "scores has ", scores.dim(),
                   " dimensions; expected at most ", int64_t{kLeadingDimensions + 1});
  MaskedSoftmaxRows s{};
  s.scores = call.arguments.read("scores", scores, scores.sizes());
  s.rows = call.rows;
  s.columns = call.columns;
  s.scale = static_cast<float>(scale);
  s.dropout = dropout_of(call, seed, p);
  const int64_t leading = scores.dim() - 1;
  for (int64_t d = 0; d < kLeadingDimensions; ++d) {
    const int64_t dimension = d - (kLeadingDimensions - leading);
    s.sizes[d] = dimension < 0 ? 1 : scores.size(dimension);
  }
  OptionalTensor laid_out = mask;
  if (laid_out) lay_out_mask(s, call.arguments, scores, *laid_out);
  Tensor output = new_tensor(scores, scores.sizes());
  Tensor probs = p != 0 ? new_tensor(scores, scores.sizes()) : no_elements(scores);
  s.output = output.data_ptr();
  s.probs = p != 0 ? probs.data_ptr() : nullptr;
  launch_masked_softmax(call.op(), s, call.dtype(), call.stream());
  return {output, probs};
}

Tensor masked_softmax_dropout_backward(const Tensor& grad_output, const Tensor& probs, double scale,
                                       const OptionalTensor& seed, double p) {
  Call call("masked_softmax_dropout_backward", "grad_output", grad_output);
  SoftmaxGradRows g{};
  g.grad_output = call.arguments.read("grad_output", grad_output, grad_output.sizes());
  g.probs = call.arguments.read("probs", probs, grad_output.sizes());
  g.rows = call.rows;
  g.columns = call.columns;
  g.scale = static_cast<float>(scale);
  g.dropout = dropout_of(call, seed, p);
  Tensor grad_scores = new_tensor(grad_output, grad_output.sizes());
  g.grad_scores = grad_scores.data_ptr();
  launch_masked_softmax_backward(call.op(), g, call.dtype(), call.stream());
  return grad_scores;
}

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) {
  m.impl("dropout_add", TORCH_BOX(&dropout_add));
  m.impl("dropout_add_backward", TORCH_BOX(&dropout_add_backward));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&dropout_add_layer_norm));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&dropout_add_layer_norm_backward));
  m.impl("fused_bias_gelu", TORCH_BOX(&fused_bias_gelu));
  m.impl("fused_bias_gelu_backward", TORCH_BOX(&fused_bias_gelu_backward));
  m.impl("masked_softmax_dropout", TORCH_BOX(&masked_softmax_dropout));
  m.impl("masked_softmax_dropout_backward", TORCH_BOX(&masked_softmax_dropout_backward));
}

}  // namespace ds_kernels::cuda
