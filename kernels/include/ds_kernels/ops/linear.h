// ds_plugin::linear, on any device: few inputs by the device's own kernel, which reads each weight once at the speed of
// memory; many by torch's matrix product, which is bound by arithmetic.
#pragma once

#include <ds_kernels/arguments.h>
#include <ds_kernels/linear.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for LinearLayer, LinearFinish and QuantizedRows. It also has
//   bool takes(const LinearLayer& layer, Dtype dtype) const;  // whether its own kernel is the way to do it
//   // How many rows are to be dequantized at a time, for torch's product with them.
//   int64_t rows_at_once(int64_t rows, int64_t columns, Dtype dtype) const;
template <class Device>
struct LinearOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("linear", TORCH_BOX(&linear));
  }

  static Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& scales, const OptionalTensor& residual, int64_t activation, bool gated) {
    const NoGrad guard;
    Arguments arguments("linear", "input", input);
    const Device device(arguments.device_index());
    Call call(device, arguments, input, weight, bias, scales, residual, activation, gated);
    return call.run();
  }

 private:
  // A call's tensors, checked.
  class Call {
   public:
    Call(const Device& device, Arguments& arguments, const Tensor& input, const Tensor& weight,
         const OptionalTensor& bias, const OptionalTensor& scales, const OptionalTensor& residual, int64_t activation,
         bool gated)
        : device_(device), arguments_(arguments), input_(input), weight_(weight), bias_(bias) {
      layer_.inputs = rows_of(op(), "input", input);
      DS_KERNELS_CHECK(weight.dim() == 2 && weight.size(1) == input.size(input.dim() - 1), op(), "input is ",
                       text_of(input.sizes()), ", weight ", text_of(weight.sizes()),
                       "; expected [..., in] and [out, in]");
      DS_KERNELS_CHECK(activation >= 0 && activation < kActivations, op(), "activation is ", activation,
                       "; expected 0 to ", int64_t{kActivations - 1});
      rows_ = weight.size(0);
      DS_KERNELS_CHECK(!gated || rows_ % 2 == 0, op(), "weight has ", rows_,
                       " rows; expected an even number for two halves");
      layer_.columns = weight.size(1);
      layer_.outputs = gated ? rows_ / 2 : rows_;
      layer_.activation = static_cast<Activation>(activation);
      layer_.gated = gated;
      take_weight(scales);
      shape_.assign(input.sizes().begin(), input.sizes().end());
      shape_.back() = layer_.outputs;
      layer_.bias = arguments_.read("bias", bias, vector_of(rows_));
      layer_.residual = arguments_.read("residual", residual, shape());
    }

    Tensor run() { return device_.takes(layer_, arguments_.dtype()) ? few() : many(); }

   private:
    const char* op() const { return arguments_.op(); }
    Shape shape() const { return {shape_.data(), shape_.size()}; }
    static int64_t code_of(const Tensor& tensor) { return TensorRef(tensor.get()).dtype_code(); }

    void take_weight(const OptionalTensor& scales) {
      arguments_.check_device("weight", weight_);
      quantized_ = code_of(weight_) == aoti_torch_dtype_int8();
      layer_.groups = 1;
      if (!quantized_) {
        DS_KERNELS_CHECK(!scales, op(), "scales are given; expected none, for weight is not int8");
        arguments_.check("weight", weight_, weight_.sizes());
        return;
      }
      DS_KERNELS_CHECK(
          scales && scales->dim() == 2 && scales->size(0) == rows_ && code_of(*scales) == aoti_torch_dtype_float32(),
          op(), "weight is int8; expected scales in float32, [", rows_, ", groups]");
      arguments_.check_device("scales", *scales);
      layer_.groups = scales->size(1);
      DS_KERNELS_CHECK(layer_.groups > 0 && layer_.columns % layer_.groups == 0, op(), "scales has ", layer_.groups,
                       " groups; expected a divisor of ", layer_.columns, " columns");
      scales_ = torch::stable::contiguous(*scales);
      layer_.scales = static_cast<const float*>(scales_->data_ptr());
    }

    Tensor few() {
      if (weight_.stride(1) != 1) weight_ = torch::stable::contiguous(weight_);
      layer_.weight = weight_.data_ptr();
      layer_.stride = weight_.stride(0);
      layer_.input = arguments_.read("input", input_, input_.sizes());
      Tensor output = new_tensor(input_, shape());
      layer_.output = output.data_ptr();
      device_.run(op(), layer_, arguments_.dtype());
      return output;
    }

    Tensor many() {
      Tensor sums = quantized_ ? quantized_product() : product(weight_, bias_);
      if (!sums.is_contiguous()) sums = torch::stable::contiguous(sums);
      if (layer_.activation == Activation::Identity && !layer_.gated && !layer_.residual) return sums;
      Tensor output = layer_.gated ? new_tensor(input_, shape()) : sums;
      layer_.output = output.data_ptr();
      device_.run(op(), LinearFinish{layer_, sums.data_ptr()}, arguments_.dtype());
      return output;
    }

    // What `torch.nn.functional.linear` gives.
    Tensor product(const Tensor& weight, const OptionalTensor& bias) const {
      using torch::stable::detail::from;
      StableIValue stack[] = {from(input_), from(weight), from(bias)};
      STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
      return torch::stable::detail::to<Tensor>(stack[0]);
    }

    // The product with int8 weights, which are dequantized block by block into the same memory.
    Tensor quantized_product() {
      weight_ = torch::stable::contiguous(weight_);
      const int64_t block = device_.rows_at_once(rows_, layer_.columns, arguments_.dtype());
      const int64_t wide_shape[] = {block, layer_.columns};
      Tensor wide = new_tensor(input_, {wide_shape, 2});
      if (block == rows_) {
        dequantize(0, rows_, wide);
        return product(wide, bias_);
      }
      std::vector<int64_t> sums_shape(shape_);
      sums_shape.back() = rows_;
      Tensor sums = new_tensor(input_, {sums_shape.data(), sums_shape.size()});
      for (int64_t first = 0; first < rows_; first += block) {
        const int64_t count = std::min(block, rows_ - first);
        dequantize(first, count, wide);
        OptionalTensor bias;
        if (bias_) bias = torch::stable::narrow(*bias_, 0, first, count);
        Tensor part = torch::stable::narrow(sums, input_.dim() - 1, first, count);
        torch::stable::copy_(part, product(torch::stable::narrow(wide, 0, 0, count), bias));
      }
      return sums;
    }

    // `count` rows of weights from `first` on.
    void dequantize(int64_t first, int64_t count, const Tensor& to) const {
      const int8_t* weight = static_cast<const int8_t*>(weight_.data_ptr()) + first * layer_.columns;
      const float* scales = layer_.scales + first * layer_.groups;
      const QuantizedRows rows{weight, scales, to.data_ptr(), count, layer_.columns, layer_.groups};
      device_.run(op(), rows, arguments_.dtype());
    }

    const Device& device_;
    Arguments& arguments_;
    const Tensor& input_;
    Tensor weight_;
    OptionalTensor bias_, scales_;
    std::vector<int64_t> shape_;
    int64_t rows_ = 0;
    LinearLayer layer_{};
    bool quantized_ = false;
  };
};

}  // namespace ds_kernels
