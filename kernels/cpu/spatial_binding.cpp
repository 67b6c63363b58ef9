// ds_plugin::nhwc_bias_add and its variants, for tensors in host memory.
#include "spatial_loops.h"

#include <ds_kernels/arguments.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(SpatialLoops, spatial_loops)

namespace {

constexpr auto kChannelsLast = torch::headeronly::MemoryFormat::ChannelsLast;

// [batch, channels, height, width], as [batch, height, width, channels] in memory.
struct Image {
  const int64_t batch, channels, height, width;
  const int64_t shape[4] = {batch, channels, height, width};
  const int64_t strides[4] = {height * width * channels, 1, width * channels, channels};

  bool lies_in(const Tensor& tensor) const {
    for (int i = 0; i < 4; ++i) {
      if (shape[i] > 1 && tensor.stride(i) != strides[i]) return false;
    }
    return true;
  }
  Tensor laid_out(const Tensor& tensor) const {
    if (lies_in(tensor)) return tensor;
    const NoGrad guard;
    return torch::stable::contiguous(tensor, kChannelsLast);
  }
  Tensor empty(const Tensor& like) const {
    AtenTensorHandle handle;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(4, shape, strides, TensorRef(like.get()).dtype_code(),
                                                           aoti_torch_device_type_cpu(), 0, &handle));
    return Tensor(handle);
  }
};

Tensor add(const char* op, const Tensor& activation, const Tensor& bias, const Tensor* other,
           const Tensor* other_bias) {
  Arguments arguments(op, "activation", activation);
  const Shape shape = activation.sizes();
  const bool image = shape.size() == 4;
  DS_KERNELS_CHECK(image || shape.size() == 3, op, "activation has shape ", text_of(shape),
                   "; expected [batch, channels, height, width] or [batch, sequence, channels]");
  const int64_t& channels = shape[image ? 1 : 2];
  BiasRows rows{};
  rows.columns = channels;
  rows.bias = arguments.read("bias", bias, vector_of(channels));
  if (other) arguments.check("other", *other, shape);
  if (other_bias) rows.other_bias = arguments.read("other_bias", *other_bias, vector_of(channels));
  const Image as_image = image ? Image{shape[0], shape[1], shape[2], shape[3]} : Image{0, 0, 0, 0};
  const auto laid_out = [&](const Tensor& t) { return image ? as_image.laid_out(t) : torch::stable::contiguous(t); };
  const Tensor input = laid_out(activation), second = other ? laid_out(*other) : input;
  Tensor output = image ? as_image.empty(activation) : new_tensor(activation, shape);
  rows.input = input.data_ptr();
  rows.other = other ? second.data_ptr() : nullptr;
  rows.output = output.data_ptr();
  const BiasLoop loop = loops_for(op, all_spatial_loops()).bias_add(arguments.dtype());
  const int64_t count = channels ? activation.numel() / channels : 0;
  parallel_for(0, count, row_grain(channels), [&](int64_t first, int64_t last) { loop(rows, first, last); });
  return output;
}

Tensor nhwc_bias_add(const Tensor& activation, const Tensor& bias) {
  return add("nhwc_bias_add", activation, bias, nullptr, nullptr);
}

Tensor nhwc_bias_add_add(const Tensor& activation, const Tensor& bias, const Tensor& other) {
  return add("nhwc_bias_add_add", activation, bias, &other, nullptr);
}

Tensor nhwc_bias_add_bias_add(const Tensor& activation, const Tensor& bias, const Tensor& other,
                              const Tensor& other_bias) {
  return add("nhwc_bias_add_bias_add", activation, bias, &other, &other_bias);
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) {
  m.impl("nhwc_bias_add", TORCH_BOX(&nhwc_bias_add));
  m.impl("nhwc_bias_add_add", TORCH_BOX(&nhwc_bias_add_add));
  m.impl("nhwc_bias_add_bias_add", TORCH_BOX(&nhwc_bias_add_bias_add));
}

}  // namespace ds_kernels::cpu
