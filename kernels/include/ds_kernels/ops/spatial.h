// ds_plugin::nhwc_bias_add and its variants, on any device.
#pragma once

#include <array>

#include <ds_kernels/arguments.h>
#include <ds_kernels/spatial.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for BiasRows.
template <class Device>
struct SpatialOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("nhwc_bias_add", TORCH_BOX(&nhwc_bias_add));
    m.impl("nhwc_bias_add_add", TORCH_BOX(&nhwc_bias_add_add));
    m.impl("nhwc_bias_add_bias_add", TORCH_BOX(&nhwc_bias_add_bias_add));
  }

  static Tensor nhwc_bias_add(const Tensor& activation, const Tensor& bias) {
    return run("nhwc_bias_add", activation, bias, nullptr, nullptr);
  }

  static Tensor nhwc_bias_add_add(const Tensor& activation, const Tensor& bias, const Tensor& other) {
    return run("nhwc_bias_add_add", activation, bias, &other, nullptr);
  }

  static Tensor nhwc_bias_add_bias_add(const Tensor& activation, const Tensor& bias, const Tensor& other,
                                       const Tensor& other_bias) {
    return run("nhwc_bias_add_bias_add", activation, bias, &other, &other_bias);
  }

 private:
  static Tensor run(const char* op, const Tensor& activation, const Tensor& bias, const Tensor* other,
                    const Tensor* other_bias) {
    Arguments arguments(op, "activation", activation);
    const Device device(arguments.device_index());
    const Shape shape = activation.sizes();
    DS_KERNELS_CHECK(shape.size() == 4 || shape.size() == 3, op, "activation has shape ", text_of(shape),
                     "; expected [batch, channels, height, width] or [batch, sequence, channels]");
    const ChannelsLast layout(shape);
    BiasRows work{};
    work.columns = layout.channels();
    work.rows = work.columns ? activation.numel() / work.columns : 0;
    work.bias = arguments.read("bias", bias, vector_of(work.columns));
    if (other) arguments.check("other", *other, shape);
    if (other_bias) work.other_bias = arguments.read("other_bias", *other_bias, vector_of(work.columns));
    const Tensor input = layout.of(activation), second = other ? layout.of(*other) : input;
    Tensor output = layout.new_tensor(activation);
    work.input = input.data_ptr();
    work.other = other ? second.data_ptr() : nullptr;
    work.output = output.data_ptr();
    device.run(op, work, arguments.dtype());
    return output;
  }

  // Elements of one place next to each other: [batch, sequence, channels] as it is, and
  // [batch, channels, height, width] as [batch, height, width, channels].
  class ChannelsLast {
   public:
    explicit ChannelsLast(Shape shape) : shape_(shape), image_(shape.size() == 4) {
      const int64_t row = shape[image_ ? 3 : 1] * channels();
      if (image_) {
        strides_ = {shape[2] * row, 1, row, channels()};
      } else {
        strides_ = {row, channels(), 1};
      }
    }

    int64_t channels() const { return shape_[image_ ? 1 : 2]; }

    // The tensor, or a copy that lies so.
    Tensor of(const Tensor& tensor) const {
      if (lies_so(tensor)) return tensor;
      const NoGrad guard;
      using torch::headeronly::MemoryFormat;
      return torch::stable::contiguous(tensor, image_ ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous);
    }

    // Of the dtype and on the device of `like`.
    Tensor new_tensor(const Tensor& like) const {
      const TensorRef model(like.get());
      AtenTensorHandle handle;
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape_.size()), shape_.data(),
                                                             strides_.data(), model.dtype_code(),
                                                             model.device_type(), model.device_index(), &handle));
      return Tensor(handle);
    }

   private:
    bool lies_so(const Tensor& tensor) const {
      const Shape strides = tensor.strides();
      for (size_t i = 0; i < shape_.size(); ++i) {
        if (shape_[i] > 1 && strides[i] != strides_[i]) return false;
      }
      return true;
    }

    Shape shape_;
    bool image_;
    std::array<int64_t, 4> strides_;
  };
};

}  // namespace ds_kernels
