// ds_plugin::softmax and softmax_, on any device.
#pragma once

#include <ds_kernels/arguments.h>
#include <ds_kernels/softmax.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for Scores.
template <class Device>
struct SoftmaxOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("softmax", TORCH_BOX(&softmax));
    m.impl("softmax_", DS_KERNELS_BOX(&softmax_));
  }

  static Tensor softmax(const Tensor& scores, const OptionalTensor& mask, const OptionalTensor& alibi, double scale,
                        bool causal, int64_t window) {
    Tensor output;
    run("softmax", scores, mask, alibi, scale, causal, window, &output);
    return output;
  }

  static void softmax_(const Tensor& scores, const OptionalTensor& mask, const OptionalTensor& alibi, double scale,
                       bool causal, int64_t window) {
    run("softmax_", scores, mask, alibi, scale, causal, window, nullptr);
  }

 private:
  // Writes to `output`, or in place if that is null.
  static void run(const char* op, const Tensor& scores, const OptionalTensor& mask, const OptionalTensor& alibi,
                  double scale, bool causal, int64_t window, Tensor* output) {
    Arguments arguments(op, "scores", scores);
    const Device device(arguments.device_index());
    const Shape shape = scores.sizes();
    DS_KERNELS_CHECK(shape.size() == 4, op, "scores has shape ", text_of(shape),
                     "; expected [batch, heads, queries, keys]");
    DS_KERNELS_CHECK(window >= 0, op, "window is ", window, "; expected a number of positions, or 0");
    Scores work{};
    if (output) {
      work.input = arguments.read("scores", scores, shape);
      *output = new_tensor(scores, shape);
      work.output = output->data_ptr();
    } else {
      work.input = work.output = arguments.write("scores", scores, shape);
    }
    const AddedTensor m(arguments, "mask", mask, scores), a(arguments, "alibi", alibi, scores);
    DS_KERNELS_CHECK(!m || !a || m.dtype() == a.dtype(), op, "alibi has another dtype than mask; expected one of both");
    work.mask = m.added();
    work.alibi = a.added();
    work.batch = shape[0];
    work.heads = shape[1];
    work.queries = shape[2];
    work.keys = shape[3];
    work.window = window;
    work.scale = static_cast<float>(scale);
    work.causal = causal;
    work.float_mask = (m && m.dtype() == Dtype::Float32) || (a && a.dtype() == Dtype::Float32);
    if (scores.numel() > 0) device.run(op, work, arguments.dtype());  // else there may be no memory at all
    arguments.write_back();
  }

  // A tensor that is added to the scores: [batch or 1, heads or 1, queries or 1, keys].
  class AddedTensor {
   public:
    AddedTensor(const Arguments& arguments, const char* name, const OptionalTensor& tensor, const Tensor& scores) {
      if (!tensor) return;
      const char* op = arguments.op();
      arguments.check_device(name, *tensor);
      DS_KERNELS_CHECK(fits(*tensor, scores), op, name, " has shape ", text_of(tensor->sizes()), "; expected ",
                       text_of(scores.sizes()), ", or 1 instead of any but the last");
      const TensorRef ref(tensor->get()), own(scores.get());
      DS_KERNELS_CHECK(ref.dtype_code() == own.dtype_code() || ref.dtype_code() == aoti_torch_dtype_float32(), op, name,
                       " has a dtype that does not fit; expected that of scores, or float32");
      dtype_ = dtype_of(op, name, ref);
      tensor_ = arguments.apart(tensor->stride(3) == 1 || tensor->size(3) == 1 ? *tensor : without_gaps(*tensor));
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
};

}  // namespace ds_kernels
