// ds_plugin::dropout_add, dropout_add_layer_norm, fused_bias_gelu, masked_softmax_dropout and their derivatives, for
// tensors in host memory.
#include "transformer_loops.h"

#include <tuple>

#include <ds_kernels/arguments.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(TransformerLoops, transformer_loops)

namespace {

const TransformerLoops& loops(const char* op) { return loops_for(op, all_transformer_loops()); }

// ---- what the ops have in common -------------------------------------------------------------------------------

Tensor new_float_tensor(Shape shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= std::max<int64_t>(shape[i], 1)) strides[i] = stride;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                         strides.data(), aoti_torch_dtype_float32(),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor no_elements(const Tensor& like) {
  const int64_t none = 0;
  return new_tensor(like, vector_of(none));
}

// The dropout of an op, whether `p` drops anything or not.
Dropout dropout_of(const char* op, const OptionalTensor& seed, double p) {
  DS_KERNELS_CHECK(p >= 0 && p < 1, op, "p is ", std::to_string(p), "; expected at least 0 and less than 1");
  if (p == 0) return {};
  DS_KERNELS_CHECK(seed, op, "seed is missing; expected one, since p is not 0");
  const TensorRef ref(seed->get());
  DS_KERNELS_CHECK(ref.dtype_code() == aoti_torch_dtype_int64() && ref.numel() == 1 && seed->is_cpu(), op,
                   "seed has ", ref.numel(), " elements; expected int64, one element, on the device of the others");
  return ds_kernels::dropout_of(static_cast<uint64_t>(*static_cast<const int64_t*>(ref.data())), p);
}

// The rows of a tensor: its elements as [rows, columns].
struct Rows {
  Rows(const char* op, const char* name, const Tensor& tensor)
      : rows(rows_of(op, name, tensor)), columns(tensor.sizes()[tensor.dim() - 1]) {}

  Shape row() const { return vector_of(columns); }

  int64_t rows, columns;
};

template <class Loop, class Data>
void run(Loop loop, const Data& data, const Rows& rows) {
  parallel_for(0, rows.rows, row_grain(rows.columns), [&](int64_t first, int64_t last) { loop(data, first, last); });
}

template <class Loop, class Data>
void run_with_scratch(Loop loop, const Data& data, const Rows& rows) {
  parallel_for(0, rows.rows, row_grain(rows.columns), [&](int64_t first, int64_t last) {
    std::vector<float> scratch(rows.columns);
    loop(data, first, last, scratch.data());
  });
}

// Runs a loop that sums the columns of `arrays` arrays. Rows are divided into parts whose number depends on the shape
// alone, so that sums do not depend on the number of threads; a part has at most 256 rows, so that they stay exact.
template <class Loop, class Data>
std::vector<float> run_with_sums(Loop loop, const Data& data, const Rows& rows, int64_t arrays, int64_t& parts) {
  constexpr int64_t kMostParts = 64, kMostRows = 256;
  const int64_t shares = std::min(kMostParts, rows.rows / row_grain(rows.columns));
  parts = std::max<int64_t>({1, shares, (rows.rows + kMostRows - 1) / kMostRows});
  const int64_t size = arrays * rows.columns;
  std::vector<float> sums(parts * size);
  parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      loop(data, rows.rows * part / parts, rows.rows * (part + 1) / parts, sums.data() + part * size);
    }
  });
  return sums;
}

// Column sums of one array, added up over the parts.
Tensor total(const char* op, const std::vector<float>& sums, int64_t parts, int64_t array, const Rows& rows,
             const Tensor& like, Dtype dtype) {
  Tensor result = new_tensor(like, rows.row());
  const int64_t distance = static_cast<int64_t>(sums.size()) / parts;
  loops(op).store_sum(dtype)(sums.data() + array * rows.columns, parts, distance, rows.columns, result.data_ptr());
  return result;
}

// ---- dropout and sum -------------------------------------------------------------------------------------------

SumRows sum_rows(Arguments& arguments, const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                 const OptionalTensor& seed, double p, const Rows& rows) {
  SumRows s{};
  s.input = arguments.read("input", input, input.sizes());
  s.bias = arguments.read("bias", bias, rows.row());
  s.residual = arguments.read("residual", residual, input.sizes());
  s.columns = rows.columns;
  s.dropping = p != 0;
  s.dropout = dropout_of(arguments.op(), seed, p);
  return s;
}

Tensor dropout_add(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                   const OptionalTensor& seed, double p) {
  const char* op = "dropout_add";
  Arguments arguments(op, "input", input);
  const Rows rows(op, "input", input);
  SumRows s = sum_rows(arguments, input, bias, residual, seed, p, rows);
  Tensor result = new_tensor(input, input.sizes());
  s.sum = result.data_ptr();
  run(loops(op).dropout_add(arguments.dtype()), s, rows);
  return result;
}

std::tuple<Tensor, Tensor> dropout_add_backward(const Tensor& grad_output, const OptionalTensor& seed, double p,
                                                bool bias) {
  const char* op = "dropout_add_backward";
  Arguments arguments(op, "grad_output", grad_output);
  const Rows rows(op, "grad_output", grad_output);
  DropoutGradRows g{};
  g.grad_output = arguments.read("grad_output", grad_output, grad_output.sizes());
  g.columns = rows.columns;
  g.dropping = p != 0;
  g.dropout = dropout_of(op, seed, p);
  Tensor grad_input = new_tensor(grad_output, grad_output.sizes());
  g.grad_input = grad_input.data_ptr();
  const auto loop = loops(op).dropout_add_backward(arguments.dtype());
  if (!bias) {
    run([loop](const DropoutGradRows& data, int64_t first, int64_t last) { loop(data, first, last, nullptr); }, g, rows);
    return {grad_input, no_elements(grad_output)};
  }
  int64_t parts;
  const std::vector<float> sums = run_with_sums(loop, g, rows, 1, parts);
  return {grad_input, total(op, sums, parts, 0, rows, grad_output, arguments.dtype())};
}

// ---- layer norm ------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm(const Tensor& input, const OptionalTensor& bias,
                                                                  const OptionalTensor& residual, const Tensor& weight,
                                                                  const Tensor& norm_bias, const OptionalTensor& seed,
                                                                  double p, double eps) {
  const char* op = "dropout_add_layer_norm";
  Arguments arguments(op, "input", input);
  const Rows rows(op, "input", input);
  NormRows n{};
  n.sum = sum_rows(arguments, input, bias, residual, seed, p, rows);
  n.weight = arguments.read("weight", weight, rows.row());
  n.bias = arguments.read("norm_bias", norm_bias, rows.row());
  n.eps = static_cast<float>(eps);
  const Shape shape = input.sizes(), row_shape{shape.data(), shape.size() - 1};
  Tensor output = new_tensor(input, shape), mean = new_float_tensor(row_shape), rstd = new_float_tensor(row_shape);
  const bool plain = !bias && !residual && p == 0;
  Tensor sum = plain ? no_elements(input) : new_tensor(input, shape);
  n.sum.sum = plain ? nullptr : sum.data_ptr();
  n.output = output.data_ptr();
  n.mean = static_cast<float*>(mean.data_ptr());
  n.rstd = static_cast<float*>(rstd.data_ptr());
  run(loops(op).norm(arguments.dtype()), n, rows);
  return {output, sum, mean, rstd};
}

// One float a row.
const float* statistic(const char* op, const char* name, const Tensor& tensor, Shape shape,
                       std::vector<Tensor>& copies) {
  const TensorRef ref(tensor.get());
  DS_KERNELS_CHECK(ref.dtype_code() == aoti_torch_dtype_float32() && tensor.is_cpu() && tensor.sizes() == shape, op,
                   name, " has shape ", text_of(tensor.sizes()), "; expected float32 ", text_of(shape),
                   " on the device of the others");
  copies.push_back(torch::stable::contiguous(tensor));
  return static_cast<const float*>(copies.back().data_ptr());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(
    const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& normed_rows, const OptionalTensor& mean,
    const Tensor& rstd, const Tensor& weight, const OptionalTensor& norm_bias, const OptionalTensor& seed, double p,
    bool bias) {
  const char* op = "dropout_add_layer_norm_backward";
  const NoGrad guard;
  Arguments arguments(op, "grad_output", grad_output);
  const Rows rows(op, "grad_output", grad_output);
  const Shape shape = grad_output.sizes(), row_shape{shape.data(), shape.size() - 1};
  std::vector<Tensor> copies;
  NormGradRows g{};
  g.grad_output = arguments.read("grad_output", grad_output, shape);
  g.grad_sum = arguments.read("grad_sum", grad_sum, shape);
  g.rows = arguments.read("rows", normed_rows, shape);
  g.mean = mean ? statistic(op, "mean", *mean, row_shape, copies) : nullptr;
  g.rstd = statistic(op, "rstd", rstd, row_shape, copies);
  g.weight = arguments.read("weight", weight, rows.row());
  g.bias = arguments.read("norm_bias", norm_bias, rows.row());
  DS_KERNELS_CHECK(mean || norm_bias, op, "mean and norm_bias are missing; expected one of them");
  g.columns = rows.columns;
  g.dropping = p != 0;
  g.dropout = dropout_of(op, seed, p);
  Tensor grad_total = new_tensor(grad_output, shape);
  Tensor grad_input = g.dropping ? new_tensor(grad_output, shape) : no_elements(grad_output);
  g.grad_total = grad_total.data_ptr();
  g.grad_input = grad_input.data_ptr();
  const Dtype dtype = arguments.dtype();
  g.bias_sums = bias;
  int64_t parts;
  const std::vector<float> sums = run_with_sums(loops(op).norm_backward(dtype), g, rows, bias ? 3 : 2, parts);
  const auto sum = [&](int64_t array) { return total(op, sums, parts, array, rows, grad_output, dtype); };
  return {grad_total, grad_input, sum(0), sum(1), bias ? sum(2) : no_elements(grad_output)};
}

// ---- bias and gelu ---------------------------------------------------------------------------------------------

Tensor fused_bias_gelu(const Tensor& input, const OptionalTensor& bias, bool tanh) {
  const char* op = "fused_bias_gelu";
  Arguments arguments(op, "input", input);
  const Rows rows(op, "input", input);
  GeluRows g{};
  g.input = arguments.read("input", input, input.sizes());
  g.bias = arguments.read("bias", bias, rows.row());
  g.columns = rows.columns;
  g.tanh = tanh;
  Tensor output = new_tensor(input, input.sizes());
  g.output = output.data_ptr();
  run(loops(op).gelu(arguments.dtype()), g, rows);
  return output;
}

std::tuple<Tensor, Tensor> fused_bias_gelu_backward(const Tensor& grad_output, const Tensor& input,
                                                    const OptionalTensor& bias, bool tanh) {
  const char* op = "fused_bias_gelu_backward";
  Arguments arguments(op, "grad_output", grad_output);
  const Rows rows(op, "grad_output", grad_output);
  GeluGradRows g{};
  g.grad_output = arguments.read("grad_output", grad_output, grad_output.sizes());
  g.input = arguments.read("input", input, grad_output.sizes());
  g.bias = arguments.read("bias", bias, rows.row());
  g.columns = rows.columns;
  g.tanh = tanh;
  Tensor grad_input = new_tensor(grad_output, grad_output.sizes());
  g.grad_input = grad_input.data_ptr();
  const auto loop = loops(op).gelu_backward(arguments.dtype());
  if (!bias) {
    run([loop](const GeluGradRows& data, int64_t first, int64_t last) { loop(data, first, last, nullptr); }, g, rows);
    return {grad_input, no_elements(grad_output)};
  }
  int64_t parts;
  const std::vector<float> sums = run_with_sums(loop, g, rows, 1, parts);
  return {grad_input, total(op, sums, parts, 0, rows, grad_output, arguments.dtype())};
}

// ---- softmax ---------------------------------------------------------------------------------------------------

// Where the rows of a mask that broadcasts to the scores begin. A copy of the mask takes its place if its rows are not
// contiguous.
void lay_out_mask(SoftmaxRows& s, const Arguments& arguments, const Tensor& scores, Tensor& mask) {
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
  const char* op = "masked_softmax_dropout";
  Arguments arguments(op, "scores", scores);
  const Rows rows(op, "scores", scores);
  DS_KERNELS_CHECK(scores.dim() <= kLeadingDimensions + 1, op, "scores has ", scores.dim(),
                   " dimensions; expected at most ", int64_t{kLeadingDimensions + 1});
  SoftmaxRows s{};
  s.scores = arguments.read("scores", scores, scores.sizes());
  s.columns = rows.columns;
  s.scale = static_cast<float>(scale);
  s.dropping = p != 0;
  s.dropout = dropout_of(op, seed, p);
  const int64_t leading = scores.dim() - 1;
  for (int64_t d = 0; d < kLeadingDimensions; ++d) {
    const int64_t dimension = d - (kLeadingDimensions - leading);
    s.sizes[d] = dimension < 0 ? 1 : scores.size(dimension);
  }
  OptionalTensor laid_out = mask;
  if (laid_out) lay_out_mask(s, arguments, scores, *laid_out);
  Tensor output = new_tensor(scores, scores.sizes());
  Tensor probs = s.dropping ? new_tensor(scores, scores.sizes()) : no_elements(scores);
  s.output = output.data_ptr();
  s.probs = probs.data_ptr();
  run_with_scratch(loops(op).softmax(arguments.dtype()), s, rows);
  return {output, probs};
}

Tensor masked_softmax_dropout_backward(const Tensor& grad_output, const Tensor& probs, double scale,
                                       const OptionalTensor& seed, double p) {
  const char* op = "masked_softmax_dropout_backward";
  Arguments arguments(op, "grad_output", grad_output);
  const Rows rows(op, "grad_output", grad_output);
  SoftmaxGradRows g{};
  g.grad_output = arguments.read("grad_output", grad_output, grad_output.sizes());
  g.probs = arguments.read("probs", probs, grad_output.sizes());
  g.columns = rows.columns;
  g.scale = static_cast<float>(scale);
  g.dropping = p != 0;
  g.dropout = dropout_of(op, seed, p);
  Tensor grad_scores = new_tensor(grad_output, grad_output.sizes());
  g.grad_scores = grad_scores.data_ptr();
  run_with_scratch(loops(op).softmax_backward(arguments.dtype()), g, rows);
  return grad_scores;
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) {
  m.impl("dropout_add", TORCH_BOX(&dropout_add));
  m.impl("dropout_add_backward", TORCH_BOX(&dropout_add_backward));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&dropout_add_layer_norm));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&dropout_add_layer_norm_backward));
  m.impl("fused_bias_gelu", TORCH_BOX(&fused_bias_gelu));
  m.impl("fused_bias_gelu_backward", TORCH_BOX(&fused_bias_gelu_backward));
  m.impl("masked_softmax_dropout", TORCH_BOX(&masked_softmax_dropout));
  m.impl("masked_softmax_dropout_backward", TORCH_BOX(&masked_softmax_dropout_backward));
}

}  // namespace ds_kernels::cpu
