// Loops of linear layers. Compiled once per instruction-set level, without torch.
#include "linear_loops.h"

#include "linear_tiles.h"
#include "loops.h"

#include <type_traits>

namespace ds_kernels::cpu {
namespace {

// Outputs whose sums wait together for what follows them.
constexpr int64_t kBlock = 64;
// Rows of weights that are near the processor while all inputs pass by.
constexpr int64_t kRows = 8;

template <int value_>
struct Constant {
  static constexpr int value = value_;
};

// From input `m` on.
inline const float* inputs_from(const float* input, const Dots& dots, int64_t m) { return input + m * dots.columns; }
inline ShortInputs inputs_from(const ShortInputs& input, const Dots& dots, int64_t m) {
  return {input.values + m * dots.columns, input.scales + m * dots.groups, input.eights + m * dots.groups};
}

// `rows` rows, at most kRows, with all inputs, the widest tiles first. Not inline, see finish().
template <class Weight, class Input>
__attribute__((noinline)) void dot_rows(const Dots& dots, int64_t rows, int64_t inputs, const Weight* weight, const float* scales, Input input,
              float* sums) {
  const auto tiles = [&](auto tile_rows, auto tile_inputs, int64_t m) {
    constexpr int R = decltype(tile_rows)::value, M = decltype(tile_inputs)::value;
    const auto one = [&](auto height, int64_t r) {
      dot_tile<decltype(height)::value, M>(dots, weight + r * dots.stride,
                                           scales ? scales + r * dots.groups : nullptr, inputs_from(input, dots, m),
                                           sums + m * kBlock + r, kBlock);
    };
    int64_t r = 0;
    for (; r + R <= rows; r += R) one(tile_rows, r);
    for (; r < rows; ++r) one(Constant<1>{}, r);
  };
  int64_t m = 0;
  for (; m + 4 <= inputs; m += 4) tiles(Constant<2>{}, Constant<4>{}, m);
  if (m + 2 <= inputs) {
    tiles(Constant<4>{}, Constant<2>{}, m);
    m += 2;
  }
  if (m < inputs) tiles(Constant<2>{}, Constant<1>{}, m);
}

// Adds what the offsets of `rows` rows from `first` on make of an input to its sums.
template <int rows>
DS_KERNELS_INLINE void add_offsets(const LinearTask& task, int64_t first, const float* group_sums, float* sums) {
  const float* offsets = task.offsets + first * task.groups;
  Floats wide[rows] = {};
  int64_t group = 0;
  for (; group + kLanes <= task.groups; group += kLanes) {
    const Floats values = load(group_sums + group);
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) wide[r] += load(offsets + r * task.groups + group) * values;
  }
  if (group != 0) {
    for (int r = 0; r < rows; ++r) sums[r] += sum_of(wide[r]);
  }
  float rest[rows] = {};
  for (; group < task.groups; ++group) {
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) rest[r] += offsets[r * task.groups + group] * group_sums[group];
  }
  for (int r = 0; r < rows; ++r) sums[r] += rest[r];
}

// The same for `count` rows, several side by side, since the few additions of one wait for each other. It is no part of
// the products' loops, which stay as they are for weights without offsets.
__attribute__((noinline)) void add_offsets(const LinearTask& task, int64_t first, int64_t count, int64_t input,
                                           float* sums) {
  constexpr int kSideBySide = 8;
  const float* group_sums = task.group_sums + input * task.groups;
  int64_t r = 0;
  for (; r + kSideBySide <= count; r += kSideBySide) {
    add_offsets<kSideBySide>(task, first + r, group_sums, sums + r);
  }
  for (; r < count; ++r) add_offsets<1>(task, first + r, group_sums, sums + r);
}

// Bias, activation, gate and residual of `count` outputs of one input. Not inline: each copy takes long to compile.
template <class Element>
__attribute__((noinline)) void finish(const LinearLayer& task, const float* sums, const float* gates, int64_t input, int64_t first,
                   int64_t count) {
  const auto* bias = static_cast<const Element*>(task.bias);
  const auto* gate_bias = bias ? bias + task.outputs + first : nullptr;
  const auto* residual = static_cast<const Element*>(task.residual);
  const int64_t at = input * task.outputs + first;
  auto* output = static_cast<Element*>(task.output) + at;
  with_activation(task.activation, [=](auto activation) {
    for_each_vector(count, [=](int64_t i, auto memory) {
      Floats sum = memory.load(sums + i);
      if (bias) sum += memory.load(bias + first + i);
      if (gates) {
        Floats gate = memory.load(gates + i);
        if (gate_bias) gate += memory.load(gate_bias + i);
        sum *= activate(activation, gate);
      } else {
        sum = activate(activation, sum);
      }
      if (residual) sum += memory.load(residual + at + i);
      memory.store(output + i, sum);
    });
  });
}

template <class Element, class Weight>
struct Linear {
  static constexpr int64_t kInputs = 8;  // at a time: their sums shall fit into the first cache

  static void run(const LinearTask& task, int64_t begin, int64_t end) {
    if (task.inputs == 1) return run_one(task, begin, end);
    if constexpr (kTiles) {
      if (sizeof(Weight) == 1 ? task.shorts.values && task.inputs >= kLeastTileInputs
                              : task.inputs >= kLeastFloatTileInputs) {
        return run_tiles(task, begin, end);
      }
    }
    for (int64_t m = 0; m < task.inputs; m += kInputs) {
      const int64_t inputs = task.inputs - m < kInputs ? task.inputs - m : kInputs;
      for (int64_t o = begin; o < end; o += kBlock) block(task, m, inputs, o, end - o < kBlock ? end - o : kBlock);
    }
  }

  // Many inputs, but no more than kMostTileInputs: all of them on some weights.
  static void run_tiles(const LinearTask& task, int64_t begin, int64_t end) {
    alignas(64) float sums[kMostTileInputs * kTileRows], gates[kMostTileInputs * kTileRows];
    for (int64_t o = begin; o < end; o += kTileRows) {
      const int64_t count = end - o < kTileRows ? end - o : kTileRows;
      tile_sums<Weight>(task, o, count, sums);
      if (task.gated) tile_sums<Weight>(task, task.outputs + o, count, gates);
      for (int64_t m = 0; m < task.inputs; ++m) {
        finish<Element>(task, sums + m * kTileRows, task.gated ? gates + m * kTileRows : nullptr, m, o, count);
      }
    }
  }

  // One input waits for weights alone. They come as two streams of rows, the halves of the share, or both operands of
  // the gate, each from its first row to its last: that is what hardware prefetchers follow.
  static void run_one(const LinearTask& task, int64_t begin, int64_t end) {
    const int64_t outputs = end - begin, half = task.gated ? outputs : (outputs + 1) / 2;
    const int64_t apart = task.gated ? task.outputs : half;
    for (int64_t o = 0; o < half; o += kBlock) {
      const int64_t count = half - o < kBlock ? half - o : kBlock;
      const int64_t pairs = task.gated || outputs - half - o >= count ? count : outputs - half - o;
      const int64_t first = begin + o;
      float sums[2][kBlock];
      for (int64_t r = 0; r < count; ++r) dot_one(task, first + r, apart, r < pairs, sums[0][r], sums[1][r]);
      if (task.offsets) {
        add_offsets(task, first, count, 0, sums[0]);
        add_offsets(task, first + apart, pairs, 0, sums[1]);
      }
      finish<Element>(task, sums[0], task.gated ? sums[1] : nullptr, 0, first, count);
      if (!task.gated) finish<Element>(task, sums[1], nullptr, 0, first + apart, pairs);
    }
  }

  // A row and, if there is a pair, the row that is so many `apart`.
  static void dot_one(const LinearTask& task, int64_t row, int64_t apart, bool pair, float& first, float& second) {
    const Dots dots{task.columns, apart * task.stride, task.groups, apart * task.groups};
    const auto* weight = static_cast<const Weight*>(task.weight) + row * task.stride;
    const float* scales = task.scales ? task.scales + row * task.groups : nullptr;
    const auto dot = [&](auto input) {
      if (!pair) return dot_tile<1, 1>(dots, weight, scales, input, &first, 1);
      float both[2];
      dot_tile<2, 1>(dots, weight, scales, input, both, 2);
      first = both[0];
      second = both[1];
    };
    if constexpr (kShortInputs && sizeof(Weight) == 1) {
      if (task.shorts.values) return dot(task.shorts);
    }
    dot(task.widened);
  }

  static void block(const LinearTask& task, int64_t first_input, int64_t inputs, int64_t first, int64_t count) {
    float sums[kInputs * kBlock], gates[kInputs * kBlock];
    dot(task, first_input, inputs, first, count, sums);
    if (task.gated) dot(task, first_input, inputs, task.outputs + first, count, gates);
    for (int64_t m = 0; m < inputs; ++m) {
      finish<Element>(task, sums + m * kBlock, task.gated ? gates + m * kBlock : nullptr, first_input + m, first, count);
    }
  }

  static void dot(const LinearTask& task, int64_t first_input, int64_t inputs, int64_t first, int64_t count,
                  float* sums) {
    const Dots dots{task.columns, task.stride, task.groups, task.groups};
    const auto* weight = static_cast<const Weight*>(task.weight);
    for (int64_t r = 0; r < count; r += kRows) {
      const int64_t row = first + r, rows = count - r < kRows ? count - r : kRows;
      const Weight* from = weight + row * task.stride;
      const float* scales = task.scales ? task.scales + row * task.groups : nullptr;
      if constexpr (kShortInputs && sizeof(Weight) == 1) {
        if (task.shorts.values) {
          dot_rows(dots, rows, inputs, from, scales, inputs_from(task.shorts, dots, first_input), sums + r);
          continue;
        }
      }
      dot_rows(dots, rows, inputs, from, scales, inputs_from(task.widened, dots, first_input), sums + r);
    }
    if (!task.offsets) return;
    for (int64_t m = 0; m < inputs; ++m) add_offsets(task, first, count, first_input + m, sums + m * kBlock);
  }
};

template <class Element>
struct LinearWiden {
  static void run(const void* from, float* to, int64_t count) {
    const auto* elements = static_cast<const Element*>(from);
    for_each_vector(count, [=](int64_t i, auto memory) { memory.store(to + i, memory.load(elements + i)); });
  }
};

// -8 times the sum.
int32_t eights_of(const int16_t* values, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += values[i];
  return -8 * sum;
}

// Whether inputs of quantized weights may be in 16 bits here.
bool shortens(const LinearLayer& layer) {
  const int64_t width = layer.columns / layer.groups;
#ifdef __AVX512F__
  if (!__builtin_cpu_supports("avx512vnni")) return false;
#endif
  return kShortInputs && width % kShortStep == 0 && width <= kMostShortColumns;
}

bool has_tiles(const LinearLayer& layer) { return kTiles && (!layer.scales || shortens(layer)); }

bool shorten_inputs(const LinearTask& task, int16_t* values, float* scales, int32_t* eights) {
  const int64_t width = task.columns / task.groups;
  if (!shortens(task)) return false;
  bool finite = true;
  for (int64_t group = 0; group < task.inputs * task.groups; ++group) {
    int16_t* to = values + group * width;
    scales[group] = shorten(task.widened + group * width, to, width);
    if (scales[group] != scales[group]) {
      finite = false;
      for (int64_t i = 0; i < width; ++i) to[i] = 0;
    }
    if (task.int4) eights[group] = eights_of(to, width);
  }
  return finite;
}

// Of the inputs in 16 bits where those are used: what they lack then counts by the weight, not by its parts.
void sum_groups(const LinearTask& task, float* sums) {
  const int64_t width = task.columns / task.groups;
  for (int64_t group = 0; group < task.inputs * task.groups; ++group) {
    if (task.shorts.values) {
      sums[group] = task.shorts.scales[group] * static_cast<float>(task.shorts.eights[group] / -8);
      continue;
    }
    Floats total{};
    for_each_vector(width, [&, from = task.widened + group * width](int64_t i, auto memory) {
      total += memory.load(from + i);
    });
    sums[group] = sum_of(total);
  }
}

// `count` weights times their scale.
template <class Element>
DS_KERNELS_INLINE void scale_weights(const int8_t* from, Element* to, int64_t count, float scale) {
  for_each_vector(count, [=](int64_t i, auto memory) { memory.store(to + i, scale * memory.load(from + i)); });
}

// The same by AVX512-BF16's instruction, which makes zeros of subnormals. By its name, see add_pairs().
#ifdef __AVX512F__
inline bool narrows_by_instruction() { return __builtin_cpu_supports("avx512bf16"); }
DS_KERNELS_INLINE void scale_vectors(const int8_t* from, BFloat16* to, int64_t count, float scale) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats x = scale * PlainVector{}.load(from + i);
    __m256i narrow;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(narrow) : "v"(x));
    __builtin_memcpy(to + i, &narrow, sizeof narrow);
  }
}
#else
inline bool narrows_by_instruction() { return false; }
inline void scale_vectors(const int8_t*, BFloat16*, int64_t, float) {}
#endif

// `count` int4 weights, whole blocks, times their scale, plus their offset.
template <class Element>
void scale_pairs(const Int4Pair* from, Element* to, int64_t count, float scale, float offset) {
  for (int64_t i = 0; i < count; i += kInt4Block) {
    int8_t wide[kInt4Block];
    unpack(from + i / 2, wide);
    for_each_vector(kInt4Block, [=, &wide](int64_t k, auto memory) {
      memory.store(to + i + k, scale * memory.load(wide + k) + offset);
    });
  }
}

template <class Element>
struct LinearDequantize {
  static void run(const QuantizedRows& rows, int64_t begin, int64_t end) {
    const int64_t width = rows.columns / rows.groups;
    const bool by_instruction = width % kLanes == 0 && narrows_by_instruction();
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t group = 0; group < rows.groups; ++group) {
        const int64_t first = row * rows.columns + group * width;
        auto* to = static_cast<Element*>(rows.to) + first;
        const int64_t at = row * rows.groups + group;
        const float scale = rows.scales[at];
        if (rows.int4) {
          const float offset = rows.offsets ? rows.offsets[at] : 0.f;
          scale_pairs(static_cast<const Int4Pair*>(rows.weight) + first / 2, to, width, scale, offset);
          continue;
        }
        const int8_t* from = static_cast<const int8_t*>(rows.weight) + first;
        if constexpr (std::is_same_v<Element, BFloat16>) {
          if (by_instruction) {
            scale_vectors(from, to, width, scale);
            continue;
          }
        }
        scale_weights(from, to, width, scale);
      }
    }
  }
};

template <class Element>
struct LinearFinishing {
  static void run(const LinearFinish& work, int64_t begin, int64_t end) {
    const LinearLayer& layer = work.layer;
    const int64_t outputs = layer.outputs, rows = layer.gated ? 2 * outputs : outputs;
    const bool gated = layer.gated;
    with_activation(layer.activation, [=, &layer, &work](auto activation) {
      for (int64_t input = begin; input < end; ++input) {
        const auto* sum = static_cast<const Element*>(work.sums) + input * rows;
        const auto* residual = static_cast<const Element*>(layer.residual);
        if (residual) residual += input * outputs;
        auto* output = static_cast<Element*>(layer.output) + input * outputs;
        for_each_vector(outputs, [=](int64_t i, auto memory) {
          Floats y = memory.load(sum + i);
          y = gated ? y * activate(activation, memory.load(sum + outputs + i)) : activate(activation, y);
          if (residual) y += memory.load(residual + i);
          memory.store(output + i, y);
        });
      }
    });
  }
};

template <class Element>
using QuantizedLinear = Linear<Element, int8_t>;
template <class Element>
using Int4Linear = Linear<Element, Int4Pair>;
template <class Element>
using FloatLinear = Linear<Element, Element>;

LinearLoop choose_linear(Dtype dtype, bool quantized, bool int4) {
  if (int4) return by_dtype<Int4Linear>(dtype);
  return quantized ? by_dtype<QuantizedLinear>(dtype) : by_dtype<FloatLinear>(dtype);
}

}  // namespace

template <>
void compute(const QuantizedRows& rows, Dtype dtype, const Threads& threads) {
  share_rows(threads, by_dtype<LinearDequantize>(dtype), rows);
}

template <>
void compute(const LinearFinish& work, Dtype dtype, const Threads& threads) {
  const auto loop = by_dtype<LinearFinishing>(dtype);
  share(threads, work.layer.inputs, grain_of(work.layer.outputs),
        [&](int64_t begin, int64_t end) { loop(work, begin, end); });
}

template <>
const LinearLoops& loops() {
  static constexpr LinearLoops all{choose_linear, by_dtype<LinearWiden>, has_tiles, shorten_inputs, sum_groups};
  return all;
}

}  // namespace ds_kernels::cpu
