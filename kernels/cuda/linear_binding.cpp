// ds_plugin::linear for tensors on CUDA devices: few inputs by our own kernel, which reads weights at the speed of
// memory; many by torch's matrix product, which is bound by arithmetic.
#include "linear_launch.h"

#include <ds_kernels/arguments.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

constexpr const char* kOp = "linear";

// From more inputs on torch's product is faster: int8 weights must be made floats for it, which takes five times the
// reading.
constexpr int64_t kFewInputs = 4, kFewInputsOfInt8 = 16;

bool is_int8(const Tensor& tensor) { return TensorRef(tensor.get()).dtype_code() == aoti_torch_dtype_int8(); }
bool is_float32(const Tensor& tensor) { return TensorRef(tensor.get()).dtype_code() == aoti_torch_dtype_float32(); }

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
      : device_(TensorRef(input.get()).device_index()), arguments_(kOp, "input", input), input_(input), weight_(weight),
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
    const NoGrad guard;
    const bool is_few = task_.inputs <= (quantized_ ? kFewInputsOfInt8 : kFewInputs);
    return is_few && task_.columns < (int64_t{1} << 32) ? few() : many();
  }

 private:
  Shape shape() const { return {shape_.data(), shape_.size()}; }

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

  Tensor few() {
    if (weight_.stride(1) != 1) weight_ = torch::stable::contiguous(weight_);
    task_.weight = weight_.data_ptr();
    task_.stride = weight_.stride(0);
    task_.input = arguments_.read("input", input_, input_.sizes());
    Tensor output = new_tensor(input_, shape());
    task_.output = output.data_ptr();
    launch_linear(kOp, task_, arguments_.dtype(), device_.stream());
    return output;
  }

  Tensor many() {
    Tensor sums = torch::stable::contiguous(matrix_product(input_, quantized_ ? dequantized() : weight_, bias_));
    if (task_.activation == Activation::Identity && !task_.gated && !task_.residual) return sums;
    Tensor output = task_.gated ? new_tensor(input_, shape()) : sums;
    task_.output = output.data_ptr();
    launch_linear_finish(kOp, task_, sums.data_ptr(), arguments_.dtype(), device_.stream());
    return output;
  }

  Tensor dequantized() {
    const Tensor weight = torch::stable::contiguous(weight_);
    task_.weight = weight.data_ptr();
    task_.stride = task_.columns;
    Tensor wide = new_tensor(input_, weight.sizes());
    launch_dequantize_weight(kOp, task_, wide.data_ptr(), arguments_.dtype(), device_.stream());
    return wide;
  }

  const Device device_;
  Arguments arguments_;
  const Tensor& input_;
  Tensor weight_;
  OptionalTensor bias_, scales_;
  std::vector<int64_t> shape_;
  LinearTask task_{};
  bool quantized_ = false;
};

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& scales,
              const OptionalTensor& residual, int64_t activation, bool gated) {
  return Linear(input, weight, bias, scales, residual, activation, gated).run();
}

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { m.impl("linear", TORCH_BOX(&linear)); }

}  // namespace ds_kernels::cuda
