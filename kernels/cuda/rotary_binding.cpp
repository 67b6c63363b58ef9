// ds_plugin::rotary and rotary_ for tensors on CUDA devices.
#include "rotary_launch.h"

#include <ds_kernels/arguments.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

// The angles: [batch or 1, tokens, rotary_dim / 2], float32.
struct Table {
  Tensor values;
  int64_t batch_stride;

  Table(const char* op, const char* name, const Tensor& tensor, const Tensor& input) : values(tensor) {
    const TensorRef ref(tensor.get()), model(input.get());
    DS_KERNELS_CHECK(ref.device_type() == model.device_type() && ref.device_index() == model.device_index(), op, name,
                     " is on another device than input; expected all tensors on one");
    DS_KERNELS_CHECK(ref.dtype_code() == aoti_torch_dtype_float32(), op, name,
                     " has another dtype; expected float32");
    DS_KERNELS_CHECK(tensor.dim() == 3 && (tensor.size(0) == 1 || tensor.size(0) == input.size(0)) &&
                         tensor.size(1) == input.size(2) && 2 * tensor.size(2) <= input.size(3),
                     op, name, " has shape ", text_of(tensor.sizes()), " for input ", text_of(input.sizes()),
                     "; expected [batch or 1, tokens, rotary_dim / 2]");
    const NoGrad guard;
    if (!tensor.is_contiguous()) values = torch::stable::contiguous(tensor);
    batch_stride = tensor.size(0) == 1 ? 0 : tensor.size(1) * tensor.size(2);
  }

  const float* data() const { return static_cast<const float*>(values.data_ptr()); }
};

Heads heads_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void rotate(const char* op, const Tensor& input, const Tensor& output, const Table& cos, const Table& sin,
            bool interleaved, Dtype dtype, Stream stream) {
  const Rotation rotation{heads_of(input),
                          heads_of(output),
                          cos.data(),
                          sin.data(),
                          cos.batch_stride,
                          sin.batch_stride,
                          input.size(0),
                          input.size(2),
                          static_cast<int>(input.size(1)),
                          static_cast<int>(input.size(3)),
                          static_cast<int>(2 * cos.values.size(2))};
  launch_rotary(op, rotation, interleaved, dtype, stream);
}

void check(const char* op, const Tensor& input, const Tensor& cos, const Tensor& sin) {
  DS_KERNELS_CHECK(input.dim() == 4, op, "input has shape ", text_of(input.sizes()),
                   "; expected [batch, heads, tokens, head_dim]");
  DS_KERNELS_CHECK(cos.sizes() == sin.sizes(), op, "sin has shape ", text_of(sin.sizes()), "; expected ",
                   text_of(cos.sizes()), ", that of cos");
}

Tensor rotary(const Tensor& input, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const char* op = "rotary";
  const Device device(TensorRef(input.get()).device_index());
  Arguments arguments(op, "input", input);
  check(op, input, cos, sin);
  const Table c(op, "cos", cos, input), s(op, "sin", sin, input);
  const NoGrad guard;
  const Tensor from = input.stride(3) == 1 ? input : torch::stable::contiguous(input);
  Tensor output = new_tensor(input, input.sizes());
  rotate(op, from, output, c, s, interleaved, arguments.dtype(), device.stream());
  return output;
}

void rotary_(const Tensor& input, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const char* op = "rotary_";
  const Device device(TensorRef(input.get()).device_index());
  Arguments arguments(op, "input", input);
  check(op, input, cos, sin);
  const Table c(op, "cos", cos, input), s(op, "sin", sin, input);
  DS_KERNELS_CHECK(!detail::may_overlap_itself(input.sizes(), input.strides()), op,
                   "input has elements that share memory (is it expanded?); expected one element at each index");
  if (input.stride(3) == 1) {
    rotate(op, input, input, c, s, interleaved, arguments.dtype(), device.stream());
    return;
  }
  const NoGrad guard;
  Tensor original = input, copy = torch::stable::contiguous(input);
  rotate(op, copy, copy, c, s, interleaved, arguments.dtype(), device.stream());
  torch::stable::copy_(original, copy);
}

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) {
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("rotary_", DS_KERNELS_BOX(&rotary_));
}

}  // namespace ds_kernels::cuda
