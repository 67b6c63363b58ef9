// ds_plugin::linear for tensors in host memory: few inputs by our own loops, which read each weight once at the speed
// of memory; many by torch's matrix product, which is bound by arithmetic.
#include "linear_loops.h"

#include <ds_kernels/arguments.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(LinearLoops, linear_loops)

namespace {

constexpr const char* kOp = "linear";

// From this many inputs on torch's product is faster; for bfloat16 weights sooner where the CPU has AMX.
constexpr int64_t kManyInputs = 24;
constexpr int64_t kManyInputsForTiles = 8;
// How much of int8 weights is dequantized at a time for that product: what then still is in the second cache.
constexpr int64_t kBlockBytes = 1 << 20;
constexpr int64_t kLeastBlock = 64;
// Outputs of one share: at least a few cache lines of them.
constexpr int64_t kShare = 16;

bool is_int8(const Tensor& tensor) { return TensorRef(tensor.get()).dtype_code() == aoti_torch_dtype_int8(); }
bool is_float32(const Tensor& tensor) { return TensorRef(tensor.get()).dtype_code() == aoti_torch_dtype_float32(); }

// Whether the CPU has AMX for bfloat16.
bool multiplies_tiles() {
#if defined(__x86_64__)
  unsigned a, b, c, d;  // GCC before 11 cannot be asked for AMX by name
  static const bool has = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
  return has;
#else
  return false;
#endif
}

// What `torch.nn.functional.linear` gives.
Tensor matrix_product(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const NoGrad guard;
  StableIValue stack[] = {torch::stable::detail::from(input), torch::stable::detail::from(weight),
                          torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// A call's tensors, checked.
class Linear {
 public:
  Linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& scales,
         const OptionalTensor& residual, int64_t activation, bool gated)
      : arguments_(kOp, "input", input), loops_(loops_for(kOp, all_linear_loops())), input_(input), weight_(weight),
        bias_(bias) {
    task_.inputs = rows_of(kOp, "input", input);
    DS_KERNELS_CHECK(weight.dim() == 2 && weight.size(1) == input.size(input.dim() - 1), kOp, "input is ",
                     text_of(input.sizes()), ", weight ", text_of(weight.sizes()),
                     "; expected [..., in] and [out, in]");
    DS_KERNELS_CHECK(activation >= 0 && activation < kActivations, kOp, "activation is ", activation,
                     "; expected 0 to ", int64_t{kActivations - 1});
    const int64_t rows = weight.size(0);
    DS_KERNELS_CHECK(!gated || rows % 2 == 0, kOp, "weight has ", rows, " rows; expected an even number for two halves");
    task_.columns = weight.size(1);
    task_.outputs = gated ? rows / 2 : rows;
    task_.activation = static_cast<Activation>(activation);
    task_.gated = gated;
    take_weight(scales);
    shape_.assign(input.sizes().begin(), input.sizes().end());
    shape_.back() = task_.outputs;
    task_.bias = arguments_.read("bias", bias, vector_of(rows));
    task_.residual = arguments_.read("residual", residual, shape());
  }

  Tensor run() {
    return task_.inputs < most_few() || task_.columns == 0 ? few() : many();
  }

 private:
  Shape shape() const { return {shape_.data(), shape_.size()}; }

  int64_t most_few() const {
    const bool tiles = arguments_.dtype() == Dtype::BFloat16 && !quantized_ && multiplies_tiles();
    return tiles ? kManyInputsForTiles : kManyInputs;
  }

  void take_weight(const OptionalTensor& scales) {
    arguments_.check_device("weight", weight_);
    quantized_ = is_int8(weight_);
    task_.groups = 1;
    if (!quantized_) {
      DS_KERNELS_CHECK(!scales, kOp, "scales are given; expected none, for weight is not int8");
      arguments_.check("weight", weight_, weight_.sizes());
    } else {
      DS_KERNELS_CHECK(scales && scales->dim() == 2 && scales->size(0) == weight_.size(0) && is_float32(*scales), kOp,
                       "weight is int8; expected scales in float32, [", weight_.size(0), ", groups]");
      arguments_.check_device("scales", *scales);
      task_.groups = scales->size(1);
      DS_KERNELS_CHECK(task_.groups > 0 && task_.columns % task_.groups == 0, kOp, "scales has ", task_.groups,
                       " groups; expected a divisor of ", task_.columns, " columns");
      scales_ = torch::stable::contiguous(*scales);
      task_.scales = static_cast<const float*>(scales_->data_ptr());
    }
  }

  // Each weight is read once, whatever the number of inputs.
  Tensor few() {
    if (weight_.stride(1) != 1) weight_ = torch::stable::contiguous(weight_);
    task_.weight = weight_.data_ptr();
    task_.stride = weight_.stride(0);
    const void* input = arguments_.read("input", input_, input_.sizes());
    std::vector<float> widened;
    if (arguments_.dtype() != Dtype::Float32) {
      widened.resize(task_.inputs * task_.columns);
      loops_.widen(arguments_.dtype())(input, widened.data(), task_.inputs * task_.columns);
      input = widened.data();
    }
    task_.input = static_cast<const float*>(input);
    // float32 is asked for by those who want its accuracy.
    if (quantized_ && arguments_.dtype() != Dtype::Float32) {
      shorts_.resize(task_.inputs * task_.columns);
      short_scales_.resize(task_.inputs * task_.groups);
      if (loops_.shorten(task_, shorts_.data(), short_scales_.data())) {
        task_.shorts = {shorts_.data(), short_scales_.data()};
      }
    }
    Tensor output = new_tensor(input_, shape());
    task_.output = output.data_ptr();
    const LinearLoop loop = loops_.linear(arguments_.dtype(), quantized_);
    const int64_t shares = (task_.outputs + kShare - 1) / kShare;
    const int64_t work = kShare * task_.columns * (task_.gated ? 2 : 1);
    parallel_for(0, shares, row_grain(work), [&](int64_t begin, int64_t end) {
      loop(task_, begin * kShare, std::min(end * kShare, task_.outputs));
    });
    return output;
  }

  Tensor many() {
    Tensor sums = quantized_ ? product_by_blocks() : matrix_product(input_, weight_, bias_);
    if (task_.activation == Activation::Identity && !task_.gated && !task_.residual) return sums;
    Tensor output = task_.gated ? new_tensor(input_, shape()) : sums;
    const void* from = sums.data_ptr();
    task_.output = output.data_ptr();
    const FinishLoop finish = loops_.finish(arguments_.dtype());
    parallel_for(0, task_.inputs, row_grain(task_.outputs),
                 [&](int64_t begin, int64_t end) { finish(task_, from, begin, end); });
    return output;
  }

  // The product with int8 weights, which are dequantized block by block into the same memory.
  Tensor product_by_blocks() {
    const NoGrad guard;
    const Tensor weight = torch::stable::contiguous(weight_);
    task_.weight = weight.data_ptr();
    task_.stride = task_.columns;
    const int64_t rows = weight.size(0), last = input_.dim() - 1;
    const int64_t fit = kBlockBytes / (task_.columns * size_of(arguments_.dtype()));
    const int64_t block = std::min(rows, std::max(fit / kLeastBlock * kLeastBlock, kLeastBlock));
    const int64_t wide_shape[] = {block, task_.columns};
    Tensor wide = new_tensor(input_, {wide_shape, 2});
    std::vector<int64_t> shape(shape_);
    shape.back() = rows;
    Tensor sums = new_tensor(input_, {shape.data(), shape.size()});
    for (int64_t first = 0; first < rows; first += block) {
      const int64_t count = std::min(block, rows - first);
      dequantize(first, count, wide.data_ptr());
      OptionalTensor bias;
      if (bias_) bias = torch::stable::narrow(*bias_, 0, first, count);
      const Tensor product = matrix_product(input_, torch::stable::narrow(wide, 0, 0, count), bias);
      if (count == rows) return product;
      Tensor part = torch::stable::narrow(sums, last, first, count);
      torch::stable::copy_(part, product);
    }
    return sums;
  }

  // `count` rows of weights from `first` on.
  void dequantize(int64_t first, int64_t count, void* to) {
    LinearTask part = task_;
    part.weight = static_cast<const int8_t*>(task_.weight) + first * task_.columns;
    part.scales = task_.scales + first * task_.groups;
    const DequantizeLoop loop = loops_.dequantize(arguments_.dtype());
    parallel_for(0, count, row_grain(task_.columns),
                 [&](int64_t begin, int64_t end) { loop(part, to, begin, end); });
  }

  Arguments arguments_;
  const LinearLoops& loops_;
  const Tensor& input_;
  Tensor weight_;
  OptionalTensor bias_, scales_;
  std::vector<int64_t> shape_;
  std::vector<int16_t> shorts_;
  std::vector<float> short_scales_;
  LinearTask task_{};
  bool quantized_ = false;
};

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& scales,
              const OptionalTensor& residual, int64_t activation, bool gated) {
  return Linear(input, weight, bias, scales, residual, activation, gated).run();
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) { m.impl("linear", TORCH_BOX(&linear)); }

}  // namespace ds_kernels::cpu
