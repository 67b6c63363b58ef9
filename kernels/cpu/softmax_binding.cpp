// ds_plugin::softmax and softmax_ for tensors in host memory.
#include "softmax_loops.h"

#include "arguments.h"
#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(SoftmaxLoops, softmax_loops)

namespace {

// A tensor that is added to the scores: [batch or 1, heads or 1, queries or 1, keys].
class Added {
 public:
  Added(const char* op, const char* name, const OptionalTensor& tensor, const Tensor& scores) {
    if (!tensor) return;
    const NoGrad guard;
    DS_KERNELS_CHECK(tensor->is_cpu(), op, name, " is on another device than scores; expected all tensors on one");
    DS_KERNELS_CHECK(fits(*tensor, scores), op, name, " has shape ", text_of(tensor->sizes()), "; expected ",
                     text_of(scores.sizes()), ", or 1 instead of any but the last");
    const TensorRef ref(tensor->get());
    const int32_t own = TensorRef(scores.get()).dtype_code();
    DS_KERNELS_CHECK(ref.dtype_code() == own || ref.dtype_code() == aoti_torch_dtype_float32(), op, name,
                     " has a dtype that does not fit; expected that of scores, or float32");
    dtype_ = dtype_of(op, name, ref);
    tensor_ = tensor->stride(3) == 1 || tensor->size(3) == 1 ? *tensor : torch::stable::contiguous(*tensor);
    data_ = static_cast<const char*>(tensor_.data_ptr());
    for (int i = 0; i < 3; ++i) strides_[i] = tensor_.size(i) == 1 ? 0 : tensor_.stride(i) * size_of(dtype_);
  }

  explicit operator bool() const { return data_ != nullptr; }
  Dtype dtype() const { return dtype_; }
  const void* at(int64_t batch, int64_t head, int64_t query) const {
    return data_ ? data_ + batch * strides_[0] + head * strides_[1] + query * strides_[2] : nullptr;
  }

 private:
  static bool fits(const Tensor& tensor, const Tensor& scores) {
    if (tensor.dim() != 4 || tensor.size(3) != scores.size(3)) return false;
    for (int i = 0; i < 3; ++i) {
      if (tensor.size(i) != 1 && tensor.size(i) != scores.size(i)) return false;
    }
    return true;
  }

  Tensor tensor_;
  const char* data_ = nullptr;
  Dtype dtype_ = Dtype::Float32;
  int64_t strides_[3] = {};  // bytes
};

// Writes to `output`, or in place if that is null.
void run(const char* op, const Tensor& scores, const OptionalTensor& mask, const OptionalTensor& alibi, double scale,
         bool causal, int64_t window, Tensor* output) {
  Arguments arguments(op, "scores", scores);
  const Shape shape = scores.sizes();
  DS_KERNELS_CHECK(shape.size() == 4, op, "scores has shape ", text_of(shape),
                   "; expected [batch, heads, queries, keys]");
  DS_KERNELS_CHECK(window >= 0, op, "window is ", window, "; expected a number of positions, or 0");
  const Added m(op, "mask", mask, scores), a(op, "alibi", alibi, scores);
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
  const int64_t heads = shape[1], queries = shape[2], keys = shape[3], width = keys * size_of(arguments.dtype());
  const bool float_mask = (m && m.dtype() == Dtype::Float32) || (a && a.dtype() == Dtype::Float32);
  const SoftmaxLoop loop = loops_for(op, all_softmax_loops()).softmax(arguments.dtype(), float_mask);
  parallel_for(0, shape[0] * heads * queries, row_grain(keys), [&](int64_t first, int64_t last) {
    std::vector<float> scratch(keys);
    for (int64_t i = first; i < last; ++i) {
      const int64_t query = i % queries, head = i / queries % heads, batch = i / queries / heads;
      const int64_t position = keys - queries + query;
      const int64_t end = causal ? std::clamp<int64_t>(position + 1, 0, keys) : keys;
      const int64_t begin = window ? std::clamp<int64_t>(position + 1 - window, 0, end) : 0;
      loop({static_cast<const char*>(input) + i * width, static_cast<char*>(results) + i * width,
            m.at(batch, head, query), a.at(batch, head, query), keys, begin, end, static_cast<float>(scale)},
           scratch.data());
    }
  });
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

DS_KERNELS_IMPL(CPU, m) {
  m.impl("softmax", TORCH_BOX(&softmax));
  m.impl("softmax_", DS_KERNELS_BOX(&softmax_));
}

}  // namespace ds_kernels::cpu
