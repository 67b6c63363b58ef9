// ds_plugin::softmax and softmax_ for tensors on CUDA devices.
#include "softmax_launch.h"

#include <ds_kernels/arguments.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

// A tensor that is added to the scores: [batch or 1, heads or 1, queries or 1, keys].
class AddedTensor {
 public:
  AddedTensor(const char* op, const char* name, const OptionalTensor& tensor, const Tensor& scores) {
    if (!tensor) return;
    const NoGrad guard;
    const TensorRef ref(tensor->get()), own(scores.get());
    DS_KERNELS_CHECK(ref.device_type() == own.device_type() && ref.device_index() == own.device_index(), op, name,
                     " is on another device than scores; expected all tensors on one");
    DS_KERNELS_CHECK(fits(*tensor, scores), op, name, " has shape ", text_of(tensor->sizes()), "; expected ",
                     text_of(scores.sizes()), ", or 1 instead of any but the last");
    DS_KERNELS_CHECK(ref.dtype_code() == own.dtype_code() || ref.dtype_code() == aoti_torch_dtype_float32(), op, name,
                     " has a dtype that does not fit; expected that of scores, or float32");
    dtype_ = dtype_of(op, name, ref);
    tensor_ = tensor->stride(3) == 1 || tensor->size(3) == 1 ? *tensor : torch::stable::contiguous(*tensor);
    const auto stride = [&](int i) { return tensor_.size(i) == 1 ? 0 : tensor_.stride(i); };
    added_ = {tensor_.data_ptr(), stride(0), stride(1), stride(2)};
  }

  explicit operator bool() const { return added_.data != nullptr; }
  Dtype dtype() const { return dtype_; }
  const Added& added() const { return added_; }

 private:
  static bool fits(const Tensor& tensor, const Tensor& scores) {
    if (tensor.dim() != 4 || tensor.size(3) != scores.size(3)) return false;
    for (int i = 0; i < 3; ++i) {
      if (tensor.size(i) != 1 && tensor.size(i) != scores.size(i)) return false;
    }
    return true;
  }

  Tensor tensor_;
  Added added_{};
  Dtype dtype_ = Dtype::Float32;
};

// Writes to `output`, or in place if that is null.
void run(const char* op, const Tensor& scores, const OptionalTensor& mask, const OptionalTensor& alibi, double scale,
         bool causal, int64_t window, Tensor* output) {
  const Device device(TensorRef(scores.get()).device_index());
  Arguments arguments(op, "scores", scores);
  const Shape shape = scores.sizes();
  DS_KERNELS_CHECK(shape.size() == 4, op, "scores has shape ", text_of(shape),
                   "; expected [batch, heads, queries, keys]");
  DS_KERNELS_CHECK(window >= 0, op, "window is ", window, "; expected a number of positions, or 0");
  const AddedTensor m(op, "mask", mask, scores), a(op, "alibi", alibi, scores);
  DS_KERNELS_CHECK(!m || !a || m.dtype() == a.dtype(), op, "alibi has another dtype than mask; expected one of both");
  const void* input;
  void* results;
  if (output) {
    input = arguments.read("scores", scores, shape);
    *output = new_tensor(scores, shape);
    results = output->data_ptr();
  } else {
    input = results = arguments.write("scores", scores, shape);
  }
  const bool float_mask = (m && m.dtype() == Dtype::Float32) || (a && a.dtype() == Dtype::Float32);
  launch_softmax(op,
                 {input, results, m.added(), a.added(), shape[0], shape[1], shape[2], shape[3], window,
                  static_cast<float>(scale), causal},
                 arguments.dtype(), float_mask, device.stream());
  arguments.write_back();
}

Tensor softmax(const Tensor& scores, const OptionalTensor& mask, const OptionalTensor& alibi, double scale, bool causal,
               int64_t window) {
  Tensor output;
  run("softmax", scores, mask, alibi, scale, causal, window, &output);
  return output;
}

void softmax_(const Tensor& scores, const OptionalTensor& mask, const OptionalTensor& alibi, double scale, bool causal,
              int64_t window) {
  run("softmax_", scores, mask, alibi, scale, causal, window, nullptr);
}

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) {
  m.impl("softmax", TORCH_BOX(&softmax));
  m.impl("softmax_", DS_KERNELS_BOX(&softmax_));
}

}  // namespace ds_kernels::cuda
