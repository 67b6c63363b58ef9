// ds_plugin::linear, on any device: few inputs by the device's own kernel, which reads each weight once at the speed of
// memory; many by torch's matrix product, which is bound by arithmetic.
#pragma once

#include <ds_kernels/arguments.h>
#include <ds_kernels/linear.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for LinearLayer, LinearFinish and QuantizedRows. It also has
//   // Whether its own kernel is the way to do it; weights whose columns are apart, of which the stride is 0, are copied for it.
//   bool takes(const LinearLayer& layer, Dtype dtype) const;
//   // Whether torch's product is faster with floats than with these.
//   bool widens(const LinearLayer& layer, Dtype dtype) const;
//   // How many rows are to be widened at a time, for torch's product with them.
//   int64_t rows_at_once(int64_t rows, int64_t columns, Dtype dtype) const;
template <class Device>
struct LinearOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("linear", TORCH_BOX(&linear));
  }

  static Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& scales, const OptionalTensor& offsets, const OptionalTensor& residual,
                       int64_t activation, bool gated) {
    const NoGrad guard;
    Arguments arguments("linear", "input", input);
    const Device device(arguments.device_index());
    Call call(device, arguments, input, weight, bias, scales, offsets, residual, activation, gated);
    return call.run();
  }

 private:
  // A call's tensors, checked.
  class Call {
   public:
    Call(const Device& device, Arguments& arguments, const Tensor& input, const Tensor& weight,
         const OptionalTensor& bias, const OptionalTensor& scales, const OptionalTensor& offsets,
         const OptionalTensor& residual, int64_t activation, bool gated)
        : device_(device), arguments_(arguments), input_(input), weight_(weight), bias_(bias) {
      layer_.inputs = rows_of(op(), "input", input);
      layer_.int4 = code_of(weight) == aoti_torch_dtype_uint8();
      layer_.columns = input.size(input.dim() - 1);
      DS_KERNELS_CHECK(weight.dim() == 2 && weight.size(1) * (layer_.int4 ? 2 : 1) == layer_.columns, op(), "input is ",
                       text_of(input.sizes()), ", weight ", text_of(weight.sizes()),
                       "; expected [..., in] and [out, in], or [out, in / 2] of int4 pairs");
      DS_KERNELS_CHECK(activation >= 0 && activation < kActivations, op(), "activation is ", activation,
                       "; expected 0 to ", int64_t{kActivations - 1});
      rows_ = weight.size(0);
      DS_KERNELS_CHECK(!gated || rows_ % 2 == 0, op(), "weight has ", rows_,
                       " rows; expected an even number for two halves");
      layer_.outputs = gated ? rows_ / 2 : rows_;
      layer_.activation = static_cast<Activation>(activation);
      layer_.gated = gated;
      take_weight(scales);
      take_offsets(offsets);
      layer_.stride = weight.stride(1) == 1 ? weight.stride(0) : 0;
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
      quantized_ = layer_.int4 || code_of(weight_) == aoti_torch_dtype_int8();
      layer_.groups = 1;
      if (!quantized_) {
        DS_KERNELS_CHECK(!scales, op(), "scales are given; expected none, for weight is neither int8 nor int4 pairs");
        arguments_.check("weight", weight_, weight_.sizes());
        return;
      }
      DS_KERNELS_CHECK(
          scales && scales->dim() == 2 && scales->size(0) == rows_ && code_of(*scales) == aoti_torch_dtype_float32(),
          op(), "weight is ", layer_.int4 ? "int4 pairs" : "int8", "; expected scales in float32, [", rows_,
          ", groups]");
      arguments_.check_device("scales", *scales);
      layer_.groups = scales->size(1);
      DS_KERNELS_CHECK(layer_.groups > 0 && layer_.columns % layer_.groups == 0, op(), "scales has ", layer_.groups,
                       " groups; expected a divisor of ", layer_.columns, " columns");
      DS_KERNELS_CHECK(!layer_.int4 || layer_.columns / layer_.groups % kInt4Block == 0, op(), "scales has ",
                       layer_.groups, " groups of ", layer_.columns, " int4 columns; expected groups of a multiple of ",
                       kInt4Block);
      scales_ = torch::stable::contiguous(*scales);
      layer_.scales = static_cast<const float*>(scales_->data_ptr());
    }

    void take_offsets(const OptionalTensor& offsets) {
      if (!offsets) return;
      DS_KERNELS_CHECK(layer_.int4, op(), "offsets are given; expected none, for weight is not int4 pairs");
      arguments_.check_device("offsets", *offsets);
      DS_KERNELS_CHECK(offsets->sizes() == scales_->sizes() && code_of(*offsets) == aoti_torch_dtype_float32(), op(),
                       "offsets has shape ", text_of(offsets->sizes()), "; expected float32 ",
                       text_of(scales_->sizes()), " as scales");
      offsets_ = torch::stable::contiguous(*offsets);
      layer_.offsets = static_cast<const float*>(offsets_->data_ptr());
    }

    Tensor few() {
      if (layer_.stride == 0) weight_ = torch::stable::contiguous(weight_);
      layer_.weight = weight_.data_ptr();
      layer_.stride = weight_.stride(0);
      layer_.input = arguments_.read("input", input_, input_.sizes());
      Tensor output = new_tensor(input_, shape());
      layer_.output = output.data_ptr();
      device_.run(op(), layer_, arguments_.dtype());
      return output;
    }

    Tensor many() {
      const bool widens = device_.widens(layer_, arguments_.dtype());
      Tensor sums = quantized_ || widens ? widened_product(widens) : product(input_, weight_, bias_);
      if (!sums.is_contiguous()) sums = torch::stable::contiguous(sums);
      if (layer_.activation == Activation::Identity && !layer_.gated && !layer_.residual) return sums;
      Tensor output = layer_.gated ? new_tensor(input_, shape()) : sums;
      layer_.output = output.data_ptr();
      device_.run(op(), LinearFinish{layer_, sums.data_ptr()}, arguments_.dtype());
      return output;
    }

    // What `torch.nn.functional.linear` gives. Of others than contiguous tensors it may round the sums twice, with the
    // bias and before it.
    static Tensor product(const Tensor& input, const Tensor& weight, OptionalTensor bias) {
      using torch::stable::detail::from;
      if (bias) bias = torch::stable::contiguous(*bias);
      StableIValue stack[] = {from(torch::stable::contiguous(input)), from(weight), from(bias)};
      STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
      return torch::stable::detail::to<Tensor>(stack[0]);
    }

    // The same with weights that are made floats, or of the input's dtype, block by block in the same memory.
    Tensor widened_product(bool to_floats) {
      if (quantized_) weight_ = torch::stable::contiguous(weight_);
      const Dtype wide = to_floats ? Dtype::Float32 : arguments_.dtype();
      const int64_t most = device_.rows_at_once(rows_, layer_.columns, wide);
      const int64_t wide_shape[] = {most, layer_.columns};
      Tensor block = to_floats ? new_float_tensor(input_, {wide_shape, 2}) : new_tensor(input_, {wide_shape, 2});
      const Tensor input = to_floats ? floats_of(input_) : input_;
      OptionalTensor bias;
      if (bias_) bias = to_floats ? floats_of(*bias_) : *bias_;
      if (most == rows_ && !to_floats) return product(input, widened(0, rows_, block, wide), bias);
      std::vector<int64_t> sums_shape(shape_);
      sums_shape.back() = rows_;
      Tensor sums = new_tensor(input_, {sums_shape.data(), sums_shape.size()});
      for (int64_t first = 0; first < rows_; first += most) {
        const int64_t count = std::min(most, rows_ - first);
        OptionalTensor part_of_bias;
        if (bias) part_of_bias = torch::stable::narrow(*bias, 0, first, count);
        Tensor part = torch::stable::narrow(sums, input_.dim() - 1, first, count);
        torch::stable::copy_(part, product(input, widened(first, count, block, wide), part_of_bias));
      }
      return sums;
    }

    static Tensor floats_of(const Tensor& tensor) {
      Tensor floats = new_float_tensor(tensor, tensor.sizes());
      torch::stable::copy_(floats, tensor);
      return floats;
    }

    // `count` rows of weights from `first` on, in the block.
    Tensor widened(int64_t first, int64_t count, Tensor& block, Dtype wide) {
      Tensor to = torch::stable::narrow(block, 0, 0, count);
      if (quantized_) {
        const uint8_t* weight = static_cast<const uint8_t*>(weight_.data_ptr()) + first * weight_.size(1);
        const int64_t group = first * layer_.groups;
        const float* offsets = layer_.offsets ? layer_.offsets + group : nullptr;
        const QuantizedRows rows{weight,         layer_.scales + group, offsets,       to.data_ptr(), count,
                                 layer_.columns, layer_.groups,         layer_.int4};
        device_.run(op(), rows, wide);
      } else {
        torch::stable::copy_(to, torch::stable::narrow(weight_, 0, first, count));
      }
      return to;
    }

    const Device& device_;
    Arguments& arguments_;
    const Tensor& input_;
    Tensor weight_;
    OptionalTensor bias_, scales_, offsets_;
    std::vector<int64_t> shape_;
    int64_t rows_ = 0;
    LinearLayer layer_{};
    bool quantized_ = false;
  };
};

}  // namespace ds_kernels
