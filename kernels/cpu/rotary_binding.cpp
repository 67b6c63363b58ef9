// ds_plugin::rotary and rotary_ for tensors in host memory.
#include "rotary_loops.h"

#include "arguments.h"
#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(RotaryLoops, rotary_loops)

namespace {

// The angles: [batch or 1, tokens, rotary_dim / 2], float32.
struct Table {
  Tensor values;
  int64_t batch_stride;

  Table(const char* op, const char* name, const Tensor& tensor, const Tensor& input) : values(tensor) {
    DS_KERNELS_CHECK(tensor.is_cpu(), op, name, " is on another device than input; expected all tensors on one");
    DS_KERNELS_CHECK(TensorRef(tensor.get()).dtype_code() == aoti_torch_dtype_float32(), op, name,
                     " has another dtype; expected float32");
    DS_KERNELS_CHECK(tensor.dim() == 3 && (tensor.size(0) == 1 || tensor.size(0) == input.size(0)) &&
                         tensor.size(1) == input.size(2) && 2 * tensor.size(2) <= input.size(3),
                     op, name, " has shape ", text_of(tensor.sizes()), " for input ", text_of(input.sizes()),
                     "; expected [batch or 1, tokens, rotary_dim / 2]");
    const NoGrad guard;
    if (!tensor.is_contiguous()) values = torch::stable::contiguous(tensor);
    batch_stride = tensor.size(0) == 1 ? 0 : tensor.size(1) * tensor.size(2);
  }

  const float* at(int64_t batch, int64_t token) const {
    return static_cast<const float*>(values.data_ptr()) + batch * batch_stride + token * values.size(2);
  }
};

// Where a head lies: strides of batch, head and token, in elements. The last dimension has stride 1.
struct Heads {
  char* data;
  int64_t element, batch, head, token;

  Heads(const Tensor& tensor, Dtype dtype)
      : data(static_cast<char*>(tensor.data_ptr())), element(size_of(dtype)), batch(tensor.stride(0)),
        head(tensor.stride(1)), token(tensor.stride(2)) {}

  char* at(int64_t b, int64_t h, int64_t t) const { return data + element * (b * batch + h * head + t * token); }
};

void rotate(const char* op, const Tensor& input, const Tensor& output, const Table& cos, const Table& sin,
            bool interleaved, Dtype dtype) {
  const RotaryLoops& loops = loops_for(op, all_rotary_loops());
  const RotaryLoop loop = (interleaved ? loops.interleaved : loops.halves)(dtype);
  const Heads from(input, dtype), to(output, dtype);
  const int64_t heads = input.size(1), tokens = input.size(2), head_dim = input.size(3);
  const int64_t rotary_dim = 2 * cos.values.size(2);
  // Heads of a token share its angles, so they come one after the other.
  parallel_for(0, input.size(0) * tokens, row_grain(heads * head_dim), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t batch = row / tokens, token = row % tokens;
      const float *c = cos.at(batch, token), *s = sin.at(batch, token);
      for (int64_t head = 0; head < heads; ++head) {
        loop(from.at(batch, head, token), to.at(batch, head, token), c, s, head_dim, rotary_dim);
      }
    }
  });
}

void check(const char* op, const Tensor& input, const Tensor& cos, const Tensor& sin) {
  DS_KERNELS_CHECK(input.dim() == 4, op, "input has shape ", text_of(input.sizes()),
                   "; expected [batch, heads, tokens, head_dim]");
  DS_KERNELS_CHECK(cos.sizes() == sin.sizes(), op, "sin has shape ", text_of(sin.sizes()), "; expected ",
                   text_of(cos.sizes()), ", that of cos");
}

Tensor rotary(const Tensor& input, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const char* op = "rotary";
  Arguments arguments(op, "input", input);
  check(op, input, cos, sin);
  const Table c(op, "cos", cos, input), s(op, "sin", sin, input);
  const NoGrad guard;
  const Tensor from = input.stride(3) == 1 ? input : torch::stable::contiguous(input);
  Tensor output = new_tensor(input, input.sizes());
  rotate(op, from, output, c, s, interleaved, arguments.dtype());
  return output;
}

void rotary_(const Tensor& input, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const char* op = "rotary_";
  Arguments arguments(op, "input", input);
  check(op, input, cos, sin);
  const Table c(op, "cos", cos, input), s(op, "sin", sin, input);
  DS_KERNELS_CHECK(!detail::may_overlap_itself(input.sizes(), input.strides()), op,
                   "input has elements that share memory (is it expanded?); expected one element at each index");
  if (input.stride(3) == 1) {
    rotate(op, input, input, c, s, interleaved, arguments.dtype());
    return;
  }
  const NoGrad guard;
  Tensor original = input, copy = torch::stable::contiguous(input);
  rotate(op, copy, copy, c, s, interleaved, arguments.dtype());
  torch::stable::copy_(original, copy);
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) {
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("rotary_", DS_KERNELS_BOX(&rotary_));
}

}  // namespace ds_kernels::cpu
