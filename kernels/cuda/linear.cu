// Linear layers on a few inputs, bound by the reading of weights: a warp has two rows of them, the two halves of an
// output if it is gated, and four inputs.

#include <ds_kernels/linear.h>

#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarpThreads;
constexpr int kRows = 2;  // of a warp

// ---- weights -----------------------------------------------------------------------------------------------------

// Elements that a thread takes at once: 16 bytes of weights.
template <class Weight, bool packed>
constexpr int kTaken = packed ? 16 / sizeof(Weight) : 1;

template <int count, class Element>
__device__ __forceinline__ void load_weights(const Element* from, float (&to)[count]) {
  load<count>(from, to);
}

// Bytes become floats by way of the mantissa of 2^23: conversions would take longer than the memory.
template <int count>
__device__ __forceinline__ void load_weights(const int8_t* from, float (&to)[count]) {
  if constexpr (count == 16) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const uint32_t four[4] = {words.x ^ 0x80808080u, words.y ^ 0x80808080u, words.z ^ 0x80808080u,
                              words.w ^ 0x80808080u};
#pragma unroll
    for (int j = 0; j < count; ++j) {
      to[j] = __uint_as_float(__byte_perm(four[j / 4], 0x4b000000u, 0x7540u + j % 4)) - (0x1p23f + 128.f);
    }
  } else {
    to[0] = static_cast<float>(*from);
  }
}

// ---- the product -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float activated(Activation activation, float x) {
  switch (activation) {
    case Activation::Relu: return activate<Activation::Relu>(x);
    case Activation::Gelu: return activate<Activation::Gelu>(x);
    case Activation::GeluTanh: return activate<Activation::GeluTanh>(x);
    case Activation::Silu: return activate<Activation::Silu>(x);
    default: return x;
  }
}

// What becomes of the sums of an output: of both halves if it is gated.
template <class Element>
__device__ __forceinline__ float finished(const LinearLayer& t, int64_t input, int64_t output, float first,
                                          float second) {
  const float result = t.gated ? first * activated(t.activation, second) : activated(t.activation, first);
  return t.residual ? result + widen(static_cast<const Element*>(t.residual)[input * t.outputs + output]) : result;
}

// Adds the products of the columns that the calling thread has of two rows.
template <int count, int inputs, class Weight, class Element>
__device__ __forceinline__ void add_products(const LinearLayer& t, const Weight* const (&weights)[kRows],
                                             const float* const (&scales)[kRows], const Element* const (&x)[inputs],
                                             float (&sums)[kRows][inputs]) {
  const auto width = static_cast<uint32_t>(t.columns / t.groups);
#pragma unroll 4
  for (int64_t column = threadIdx.x % kWarpThreads * count; column < t.columns; column += kWarpThreads * count) {
    float weight[kRows][count];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      load_weights<count>(weights[r] + column, weight[r]);
      if (!scales[r]) continue;
      const float scale = scales[r][static_cast<uint32_t>(column) / width];
#pragma unroll
      for (int j = 0; j < count; ++j) weight[r][j] *= scale;
    }
#pragma unroll
    for (int m = 0; m < inputs; ++m) {
      float values[count];
      load<count>(x[m] + column, values);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < count; ++j) sums[r][m] += weight[r][j] * values[j];
      }
    }
  }
}

template <class Weight, class Element, int inputs, bool packed>
__global__ void __launch_bounds__(kThreads) linear_kernel(const LinearLayer t) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpThreads;
  // Two neighbouring outputs, or the halves of one.
  const int64_t begin = t.gated ? pair : pair * kRows, distance = t.gated ? t.outputs : 1;
  const int64_t first_input = static_cast<int64_t>(blockIdx.y) * inputs;
  if (begin >= t.outputs) return;  // a whole warp
  const bool has_second = t.gated || begin + 1 < t.outputs;
  const int64_t rows[kRows] = {begin, has_second ? begin + distance : begin};
  const Weight* weights[kRows];
  const float* scales[kRows];
  const Element* x[inputs];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    weights[r] = static_cast<const Weight*>(t.weight) + rows[r] * t.stride;
    scales[r] = t.scales ? t.scales + rows[r] * t.groups : nullptr;
  }
#pragma unroll
  for (int m = 0; m < inputs; ++m) {  // where there are fewer inputs, the last one again
    const int64_t input = first_input + m < t.inputs ? first_input + m : t.inputs - 1;
    x[m] = static_cast<const Element*>(t.input) + input * t.columns;
  }
  float sums[kRows][inputs] = {};
  add_products<kTaken<Weight, packed>>(t, weights, scales, x, sums);
  const auto* bias = static_cast<const Element*>(t.bias);
#pragma unroll
  for (int m = 0; m < inputs; ++m) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r][m] = over_warp<Sum>(sums[r][m]);
      if (bias) sums[r][m] += widen(bias[rows[r]]);
    }
    const int64_t input = first_input + m;
    if (input >= t.inputs || static_cast<int>(threadIdx.x) % kWarpThreads != m) continue;
    auto* output = static_cast<Element*>(t.output) + input * t.outputs;
    narrow(finished<Element>(t, input, begin, sums[0][m], sums[1][m]), output[begin]);
    if (!t.gated && has_second) narrow(finished<Element>(t, input, begin + 1, sums[1][m], 0), output[begin + 1]);
  }
}

// ---- around torch's product --------------------------------------------------------------------------------------

template <class Element, bool packed>
__global__ void dequantize_kernel(const QuantizedRows q, const unsigned blocks_of_row) {
  constexpr int count = kTaken<int8_t, packed>;
  const auto [row, column] = Place(blocks_of_row, count);
  if (column >= q.columns) return;
  float weight[count];
  load_weights<count>(static_cast<const int8_t*>(q.weight) + row * q.columns + column, weight);
  const float scale = q.scales[row * q.groups + column / (q.columns / q.groups)];
#pragma unroll
  for (int j = 0; j < count; ++j) weight[j] *= scale;
  store<count>(static_cast<Element*>(q.to) + row * q.columns + column, weight);
}

// A thread has a word of four weights, 16 columns apart.
template <class Element>
__global__ void dequantize_int4_kernel(const QuantizedRows q, const unsigned blocks_of_row) {
  const auto [row, word] = Place(blocks_of_row, 1);
  if (word >= q.columns / 4) return;
  const auto* bytes = static_cast<const uint8_t*>(q.weight) + row * (q.columns / 2) + 2 * word;
  const unsigned bits = bytes[0] | bytes[1] << 8;  // a view may begin at any byte
  const int64_t column = word / 16 * kInt4Block + word % 16;
  const int64_t group = row * q.groups + column / (q.columns / q.groups);
  const float scale = q.scales[group], offset = q.offsets ? q.offsets[group] : 0.f;
  auto* to = static_cast<Element*>(q.to) + row * q.columns + column;
#pragma unroll
  for (int k = 0; k < 4; ++k) narrow(scale * (static_cast<int>(bits >> 4 * k & 15) - 8) + offset, to[16 * k]);
}

template <class Element>
__global__ void finish_kernel(const LinearLayer t, const Element* sums, const unsigned blocks_of_row) {
  const auto [input, output] = Place(blocks_of_row, 1);
  if (output >= t.outputs) return;
  const Element* from = sums + input * (t.gated ? 2 * t.outputs : t.outputs) + output;
  const float second = t.gated ? widen(from[t.outputs]) : 0.f;
  narrow(finished<Element>(t, input, output, widen(*from), second),
         static_cast<Element*>(t.output)[input * t.outputs + output]);
}

// ---- launches ----------------------------------------------------------------------------------------------------

template <class Weight, class Element>
void launch_linear(const LinearLayer& t, const Stream& stream) {
  constexpr int count = kTaken<Weight, true>;
  const int64_t width = t.columns / t.groups;
  const bool packed = width % count == 0 && t.stride % count == 0 && is_aligned(t.weight) && is_aligned(t.input);
  const auto run = [&](auto inputs) {
    const int64_t pairs = t.gated ? t.outputs : (t.outputs + kRows - 1) / kRows;
    dim3 blocks = grid(stream, (pairs + kWarps - 1) / kWarps);
    blocks.y = static_cast<unsigned>((t.inputs + inputs - 1) / inputs);
    const auto kernel =
        packed ? linear_kernel<Weight, Element, inputs, true> : linear_kernel<Weight, Element, inputs, false>;
    launch(stream, kernel, blocks, kThreads, t);
  };
  t.inputs == 1 ? run(Constant<1>{}) : run(Constant<4>{});
}

}  // namespace

// For few inputs: each weight is read once for four of them.
template <>
void compute(const LinearLayer& t, Dtype dtype, const Stream& stream) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    return t.scales ? launch_linear<int8_t, Element>(t, stream) : launch_linear<Element, Element>(t, stream);
  });
}

template <>
void compute(const QuantizedRows& q, Dtype dtype, const Stream& stream) {
  constexpr int count = kTaken<int8_t, true>;
  if (q.columns == 0) return;
  const int64_t width = q.columns / q.groups;
  const bool packed = width % count == 0 && is_aligned(q.weight) && is_aligned(q.to);
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    if (q.int4) {
      const Share share(q.columns / 4);
      return launch(stream, dequantize_int4_kernel<Element>, share.blocks(stream, q.rows), share.threads, q,
                    share.blocks_of_row);
    }
    const Share share(packed ? q.columns / count : q.columns);
    const auto kernel = packed ? dequantize_kernel<Element, true> : dequantize_kernel<Element, false>;
    launch(stream, kernel, share.blocks(stream, q.rows), share.threads, q, share.blocks_of_row);
  });
}

template <>
void compute(const LinearFinish& finish, Dtype dtype, const Stream& stream) {
  const LinearLayer& t = finish.layer;
  if (t.outputs == 0) return;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const Share share(t.outputs);
    launch(stream, finish_kernel<Element>, share.blocks(stream, t.inputs), share.threads, t,
           static_cast<const Element*>(finish.sums), share.blocks_of_row);
  });
}

}  // namespace ds_kernels::cuda
