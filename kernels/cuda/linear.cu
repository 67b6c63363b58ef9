// Linear layers on a few inputs, bound by the reading of weights: a warp has two rows of them, the two halves of an
// output if it is gated, and four inputs.

#include <ds_kernels/linear.h>

#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarpThreads;
constexpr int kRows = 2;  // of a warp

// ---- weights -----------------------------------------------------------------------------------------------------

// What a thread takes of a row of weights at once: `kCount` words, 16 bytes if `packed`. A word is one weight; `get`
// makes floats of them.
template <class Weight, bool packed>
struct Words {
  static constexpr int kColumns = 1, kSize = 1;  // of a word: its columns, and how many of `Weight` it takes
  static constexpr int kCount = packed ? 16 / sizeof(Weight) : 1;
  static constexpr int kAtOnce = 4;  // turns whose loads are under way together

  static __device__ __forceinline__ int64_t column_of(int64_t word) { return word; }

  __device__ __forceinline__ Words(const Weight* row, int64_t word) : from_(row + word) {}
  __device__ __forceinline__ void get(int, float (&to)[kCount]) const { load<kCount>(from_, to); }

 private:
  const Weight* from_;
};

// A word has the int4 weights of four columns, a quarter of a block apart; `get` makes floats of one in each word.
template <bool packed>
struct Words<Int4Pair, packed> {
  static constexpr int kColumns = 4, kSize = 2;
  static constexpr int kCount = packed ? 8 : 1;
  static constexpr int kAtOnce = 2;

  static __device__ __forceinline__ int64_t column_of(int64_t word) { return word / 16 * kInt4Block + word % 16; }

  __device__ __forceinline__ Words(const Int4Pair* row, int64_t word) {
    const Int4Pair* from = row + word * kSize;
    if constexpr (packed) {
      load_words(reinterpret_cast<const uint32_t*>(from), two_);
    } else {
      two_[0] = from[0].bits | from[1].bits << 8;  // a view may begin at any byte
    }
  }

  // As int8 weights by way of the mantissa of 2^23, but without moving the bits: a step of them is worth 16^k there.
  __device__ __forceinline__ void get(int k, float (&to)[kCount]) const {
    const float step = 1.f / static_cast<float>(1 << 4 * k);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const uint32_t word = __byte_perm(two_[j / 2], 0x4b00u, j % 2 ? 0x5432u : 0x5410u);  // below the exponent of 2^23
      to[j] = __uint_as_float(word & (0xff000000u | 15u << 4 * k)) * step - (0x1p23f * step + 8.f);
    }
  }

 private:
  uint32_t two_[packed ? kCount / 2 : 1];  // words, the first one lowest
};

// From one column of a word to the next.
constexpr int64_t kColumnsApart = kInt4Block / 4;

// What levels of a group stand for: level * scale + offset.
template <class Weight>
struct Steps {
  static constexpr bool kQuantized = sizeof(Weight) == 1;
  float scale = 1, offset = 0;

  template <class Layer>
  __device__ __forceinline__ Steps(const Layer& t, int64_t group) {  // one of all rows' groups
    if constexpr (kQuantized) {
      scale = t.scales[group];
      if (std::is_same_v<Weight, Int4Pair> && t.offsets) offset = t.offsets[group];
    }
  }
  template <int count>
  __device__ __forceinline__ void apply(float (&levels)[count]) const {
    if constexpr (kQuantized) {
#pragma unroll
      for (int j = 0; j < count; ++j) levels[j] = levels[j] * scale + offset;
    }
  }
};

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

// What becomes of the sums of an output before the residual: of both halves if it is gated.
__device__ __forceinline__ float without_residual(const LinearLayer& t, float first, float second) {
  return t.gated ? first * activated(t.activation, second) : activated(t.activation, first);
}
template <class Element>
__device__ __forceinline__ float finished(const LinearLayer& t, int64_t input, int64_t output, float first,
                                          float second) {
  const float result = without_residual(t, first, second);
  return t.residual ? result + widen(static_cast<const Element*>(t.residual)[input * t.outputs + output]) : result;
}

// Adds the products of the columns that the calling thread has of two rows.
template <class Weight, bool packed, int inputs, class Element>
__device__ __forceinline__ void add_products(const LinearLayer& t, const int64_t (&rows)[kRows],
                                             const Element* const (&x)[inputs], float (&sums)[kRows][inputs]) {
  using Taken = Words<Weight, packed>;
  constexpr int count = Taken::kCount;
  const auto* weights = static_cast<const Weight*>(t.weight);
  const auto width = static_cast<uint32_t>(t.columns / t.groups);
#pragma unroll Taken::kAtOnce
  for (int64_t word = threadIdx.x % kWarpThreads * count; word < t.columns / Taken::kColumns;
       word += kWarpThreads * count) {
    const Taken taken[kRows] = {{weights + rows[0] * t.stride, word}, {weights + rows[1] * t.stride, word}};
    const int64_t first = Taken::column_of(word), group = static_cast<uint32_t>(first) / width;
    const Steps<Weight> steps[kRows] = {{t, rows[0] * t.groups + group}, {t, rows[1] * t.groups + group}};
#pragma unroll
    for (int k = 0; k < Taken::kColumns; ++k) {
      float weight[kRows][count];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        taken[r].get(k, weight[r]);
        steps[r].apply(weight[r]);
      }
#pragma unroll
      for (int m = 0; m < inputs; ++m) {
        float values[count];
        load<count>(x[m] + first + k * kColumnsApart, values);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int j = 0; j < count; ++j) sums[r][m] += weight[r][j] * values[j];
        }
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
  const Element* x[inputs];
#pragma unroll
  for (int m = 0; m < inputs; ++m) {  // where there are fewer inputs, the last one again
    const int64_t input = first_input + m < t.inputs ? first_input + m : t.inputs - 1;
    x[m] = static_cast<const Element*>(t.input) + input * t.columns;
  }
  float sums[kRows][inputs] = {};
  add_products<Weight, packed>(t, rows, x, sums);
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

template <class Weight, class Element, bool packed>
__global__ void dequantize_kernel(const QuantizedRows q, const unsigned blocks_of_row) {
  using Taken = Words<Weight, packed>;
  const auto [row, word] = Place(blocks_of_row, Taken::kCount);
  const int64_t words = q.columns / Taken::kColumns;
  if (word >= words) return;
  const Taken taken(static_cast<const Weight*>(q.weight) + row * words * Taken::kSize, word);
  const int64_t first = Taken::column_of(word);
  const Steps<Weight> steps(q, row * q.groups + first / (q.columns / q.groups));
  auto* to = static_cast<Element*>(q.to) + row * q.columns + first;
#pragma unroll
  for (int k = 0; k < Taken::kColumns; ++k) {
    float weight[Taken::kCount];
    taken.get(k, weight);
    steps.apply(weight);
    store<Taken::kCount>(to + k * kColumnsApart, weight);
  }
}

template <class Element, int pack>
__global__ void finish_kernel(const LinearLayer t, const Element* sums, const unsigned blocks_of_row) {
  const auto [input, output] = Place(blocks_of_row, pack);
  if (output >= t.outputs) return;
  const Element* from = sums + input * (t.gated ? 2 * t.outputs : t.outputs) + output;
  float first[pack], second[pack] = {};
  load<pack>(from, first);
  if (t.gated) load<pack>(from + t.outputs, second);
#pragma unroll
  for (int j = 0; j < pack; ++j) first[j] = without_residual(t, first[j], second[j]);
  add<Element>(t.residual, input * t.outputs + output, first);
  store<pack>(static_cast<Element*>(t.output) + input * t.outputs + output, first);
}

// ---- launches ----------------------------------------------------------------------------------------------------

template <class Weight, class Element>
void launch_linear(const LinearLayer& t, const Stream& stream) {
  constexpr int count = 16 / sizeof(Weight);
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

template <class Weight, class Element>
void launch_dequantize(const QuantizedRows& q, const Stream& stream) {
  const auto run = [&](auto packed) {
    using Taken = Words<Weight, packed != 0>;
    const Share share(q.columns / Taken::kColumns / Taken::kCount);
    launch(stream, dequantize_kernel<Weight, Element, packed != 0>, share.blocks(stream, q.rows), share.threads, q,
           share.blocks_of_row);
  };
  const bool packed = q.columns / q.groups % 16 == 0 && is_aligned(q.weight) && is_aligned(q.to);
  packed ? run(Constant<1>{}) : run(Constant<0>{});
}

}  // namespace

// For few inputs: each weight is read once for four of them.
template <>
void compute(const LinearLayer& t, Dtype dtype, const Stream& stream) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    if (t.int4) return launch_linear<Int4Pair, Element>(t, stream);
    return t.scales ? launch_linear<int8_t, Element>(t, stream) : launch_linear<Element, Element>(t, stream);
  });
}

template <>
void compute(const QuantizedRows& q, Dtype dtype, const Stream& stream) {
  if (q.columns == 0) return;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    return q.int4 ? launch_dequantize<Int4Pair, Element>(q, stream) : launch_dequantize<int8_t, Element>(q, stream);
  });
}

template <>
void compute(const LinearFinish& finish, Dtype dtype, const Stream& stream) {
  const LinearLayer& t = finish.layer;
  if (t.outputs == 0) return;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto run = [&](auto pack) {
      const Share share(t.outputs / pack);
      launch(stream, finish_kernel<Element, pack>, share.blocks(stream, t.inputs), share.threads, t,
             static_cast<const Element*>(finish.sums), share.blocks_of_row);
    };
    const bool packed = in_packs<Element>(t.outputs, finish.sums, t.residual, t.output);
    packed ? run(Constant<kPack<Element>>{}) : run(Constant<1>{});
  });
}

}  // namespace ds_kernels::cuda
