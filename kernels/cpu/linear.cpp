// Loops of linear layers. Compiled once per instruction-set level, without torch.
#include "linear_loops.h"

#include "linear_amx.h"
#include "linear_tiles.h"
#include "loops.h"

#include <type_traits>

namespace ds_kernels::cpu {
namespace {

// Outputs whose sums wait together for what follows them.
constexpr int64_t kBlock = 64;
// From input `m` on.
inline const float* inputs_from(const float* input, const Dots& dots, int64_t m) { return input + m * dots.columns; }
inline ShortInputs inputs_from(const ShortInputs& input, const Dots& dots, int64_t m) {
  const int64_t groups = m * dots.groups;
  const uint8_t* bytes = input.bytes ? input.bytes + groups * bytes_of(dots.width) : nullptr;
  return {input.values + m * dots.columns, input.scales + groups, input.eights + groups, bytes};
}

// From this many inputs on laying out tiles takes less time than it saves, also where weights come from memory. Measured on one
// CPU of each: AMD's Zen 4 takes two cycles for each vector that a tile is laid out with.
inline int64_t least_tile_inputs(bool quantized) { return is_amd() ? 13 : quantized ? 5 : 7; }

// How far ahead weights are fetched. On Zen 5 int4 weights take 0.82 times as long with 3 KiB as with Zen 4's 256 bytes, by one
// thread, and others as long.
uintptr_t weight_prefetch_bytes() {
  static const uintptr_t bytes = is_zen5_or_later() ? 3072 : stream_prefetch_bytes();
  return bytes;
}

template <int rows, class Weight>
Rows<rows, Weight> rows_of(const LinearTask& task, const int64_t (&numbers)[rows]) {
  Rows<rows, Weight> all;
  for (int r = 0; r < rows; ++r) {
    all.weights[r] = static_cast<const Weight*>(task.weight) + numbers[r] * task.stride;
    all.scales[r] = task.scales ? task.scales + numbers[r] * task.groups : nullptr;
  }
  return all;
}

// `count` rows of each of some streams, from its row `first` on.
template <int streams>
struct Streams {
  int64_t first[streams], count[streams];
};

// `rows` rows, of the given numbers, with `count` inputs, for which `from(m)` gives those from one on.
template <class Weight, int rows, class From>
DS_KERNELS_INLINE void dot_inputs(const Dots& dots, const LinearTask& task, const int64_t (&numbers)[rows], int64_t count,
                                  From from, float* const (&sums)[rows]) {
  const Rows<rows, Weight> weights = rows_of<rows, Weight>(task, numbers);
  const auto tile = [&](auto inputs, int64_t m) {
    float* to[rows];
    for (int r = 0; r < rows; ++r) to[r] = sums[r] + m * kBlock;
    dot_tile<decltype(inputs)::value>(dots, weights, from(m), to, kBlock);
  };
  if constexpr (rows > 2) {
    tile(std::integral_constant<int, 1>{}, 0);  // run_streams() has no more inputs for so many
  } else {
    int64_t m = 0;
    for (; m + 4 <= count; m += 4) tile(std::integral_constant<int, 4>{}, m);
    if (m + 2 <= count) {
      tile(std::integral_constant<int, 2>{}, m);
      m += 2;
    }
    if (m < count) tile(std::integral_constant<int, 1>{}, m);
  }
}

// Rows with all inputs, a row of each stream at a time, [stream][input * kBlock + row]. Not inline, see finish().
template <class Weight, int streams, class Input>
__attribute__((noinline)) void dot_streams(const LinearTask& task, const Streams<streams>& rows, Input input,
                                           int64_t first_input, int64_t inputs, float* const (&sums)[streams]) {
  const Dots dots{task.columns, task.groups, task.columns / task.groups, weight_prefetch_bytes()};
  const auto from = [&](int64_t m) { return inputs_from(input, dots, first_input + m); };
  int64_t all = rows.count[0];
  for (const int64_t count : rows.count) all = count < all ? count : all;
  for (int64_t r = 0; r < all; ++r) {
    int64_t numbers[streams];
    float* to[streams];
    for (int s = 0; s < streams; ++s) {
      numbers[s] = rows.first[s] + r;
      to[s] = sums[s] + r;
    }
    dot_inputs<Weight>(dots, task, numbers, inputs, from, to);
  }
  for (int s = 0; s < streams; ++s) {
    for (int64_t r = all; r < rows.count[s]; ++r) {
      dot_inputs<Weight, 1>(dots, task, {rows.first[s] + r}, inputs, from, {sums[s] + r});
    }
  }
}

// Adds what the offsets of `rows` rows from `first` on make of an input to its sums.
template <int rows>
DS_KERNELS_INLINE void add_offsets(const LinearTask& task, int64_t first, const float* group_sums, float* sums) {
  const float* offsets = task.offsets + first * task.groups;
  Floats wide[rows] = {};
  for_each_vector(task.groups, [&](int64_t group, auto memory) {
    const Floats values = memory.load(group_sums + group);
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) wide[r] += memory.load(offsets + r * task.groups + group) * values;
  });
  for (int r = 0; r < rows; ++r) sums[r] += sum_of(wide[r]);
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

// Sums of some inputs, those of an input `stride` after those of the one before; gates are null if there are none.
struct Sums {
  const float *sums, *gates;
  int64_t stride;
};

// Bias, activation, gate and residual of `count` outputs of `inputs` inputs. Not inline: each copy takes long to compile.
template <class Element>
__attribute__((noinline)) void finish(const LinearLayer& task, const Sums& from, int64_t first_input, int64_t inputs, int64_t first,
                                      int64_t count) {
  const auto* bias = static_cast<const Element*>(task.bias);
  const auto* gate_bias = bias ? bias + task.outputs + first : nullptr;
  const auto* residual = static_cast<const Element*>(task.residual);
  with_activation(task.activation, [=, &task](auto activation) {
    for (int64_t m = 0; m < inputs; ++m) {
      const float* sums = from.sums + m * from.stride;
      const float* gates = from.gates ? from.gates + m * from.stride : nullptr;
      const int64_t at = (first_input + m) * task.outputs + first;
      auto* output = static_cast<Element*>(task.output) + at;
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
        if (residual) sum = uncontracted(sum) + memory.load(residual + at + i);
        memory.store(output + i, sum);
      });
    }
  });
}

template <class Element, class Weight>
struct Linear {
  static constexpr int64_t kInputs = 12;  // at a time: their sums shall fit into the first cache
  static constexpr bool kInt4 = std::is_same_v<Weight, Int4Pair>, kQuantized = sizeof(Weight) == 1;
  // Streams for one input. By AVX-512 its products with int4 weights are sooner there than the sums of two rows, which wait for
  // themselves; by AVX2 more comes from memory that way, of all weights.
  static constexpr int kStreams = (kLanes == 16 && kInt4) || kLanes == 8 ? 4 : 2;

  // Whether inputs are there as tiles take them; and whether they are not there as streams take those of int4 weights: the last
  // block of many inputs may have a few, 129 being 128 and 1.
  static bool has_values(const LinearTask& task) { return !kQuantized || task.shorts.values; }
  static bool lacks_bytes(const LinearTask& task) { return kInt4 && !task.shorts.bytes; }

  static void run(const LinearTask& task, int64_t begin, int64_t end) {
    if constexpr (kTiles) {
      if (has_values(task) && (task.inputs >= least_tile_inputs(kQuantized) || lacks_bytes(task))) {
        return run_tiles(task, begin, end);
      }
    }
    if (kStreams > 2 && task.inputs == 1) return run_streams<kStreams>(task, 0, 1, begin, end);
    for (int64_t m = 0; m < task.inputs; m += kInputs) {
      run_streams<2>(task, m, task.inputs - m < kInputs ? task.inputs - m : kInputs, begin, end);
    }
  }

  // Many inputs, but no more than kMostTileInputs: all of them on some weights.
  static void run_tiles(const LinearTask& task, int64_t begin, int64_t end) {
    alignas(64) float sums[kMostTileInputs * kTileRows], gates[kMostTileInputs * kTileRows];
    for (int64_t o = begin; o < end; o += kTileRows) {
      const int64_t count = end - o < kTileRows ? end - o : kTileRows;
      tile_sums<Weight>(task, o, count, sums);
      if (task.gated) tile_sums<Weight>(task, task.outputs + o, count, gates);
      finish<Element>(task, {sums, task.gated ? gates : nullptr, kTileRows}, 0, task.inputs, o, count);
    }
  }

  // A few inputs wait for weights alone. They come as a few streams of rows, equal parts of the share, or of both operands
  // of the gate, each from its first row to its last: that is what hardware prefetchers follow.
  template <int streams>
  static void run_streams(const LinearTask& task, int64_t first_input, int64_t inputs, int64_t begin, int64_t end) {
    const int parts = task.gated ? streams / 2 : streams;
    const int64_t outputs = end - begin, part = (outputs + parts - 1) / parts;
    for (int64_t o = 0; o < part; o += kBlock) {
      float room[streams][kInputs * kBlock];
      float* sums[streams];
      Streams<streams> rows;
      for (int s = 0; s < streams; ++s) {
        const int64_t from = s % parts * part + o, end_of_part = (s % parts + 1) * part;
        const int64_t left = (end_of_part < outputs ? end_of_part : outputs) - from;  // the last parts may be shorter
        sums[s] = room[s];
        rows.first[s] = begin + from + s / parts * task.outputs;
        rows.count[s] = left < 0 ? 0 : left < kBlock ? left : kBlock;
      }
      dot(task, rows, first_input, inputs, sums);
      for (int s = 0; s < parts; ++s) {
        if (rows.count[s] == 0) continue;
        finish<Element>(task, {sums[s], task.gated ? sums[parts + s] : nullptr, kBlock}, first_input, inputs, rows.first[s],
                        rows.count[s]);
      }
    }
  }

  template <int streams>
  static void dot(const LinearTask& task, const Streams<streams>& rows, int64_t first_input, int64_t inputs,
                  float* const (&sums)[streams]) {
    const auto with = [&](auto all) { dot_streams<Weight>(task, rows, all, first_input, inputs, sums); };
    if constexpr (kShortInputs && kQuantized) {
      if (task.shorts.values) {
        with(task.shorts);
      } else {
        with(task.widened);
      }
    } else {
      with(task.widened);
    }
    if (!task.offsets) return;
    for (int s = 0; s < streams; ++s) {
      for (int64_t m = 0; m < inputs; ++m) {
        add_offsets(task, rows.first[s], rows.count[s], first_input + m, sums[s] + m * kBlock);
      }
    }
  }
};

#if defined(__AVX512F__)
// Many inputs in bfloat16, but no more than kMostAmxInputs, by AMX.
template <class Weight>
struct LinearByAmx {
  static void run(const LinearTask& task, int64_t begin, int64_t end, float* room) {
    const int64_t at_once = amx_outputs_at_once(task.inputs), sums = at_once * amx_blocks(task.inputs) * kAmxInputs;
    const AmxRoom rows{reinterpret_cast<uint16_t*>(room), room + at_once * amx_columns_at_once(task.inputs) / 2};
    const AmxRoom gates{rows.laid_out, task.gated ? rows.sums + sums : nullptr};
    Amx::begin();
    for (int64_t o = begin; o < end; o += at_once) {
      const int64_t count = end - o < at_once ? end - o : at_once;
      if (task.gated) amx_sums<Weight>(task, task.outputs + o, count, gates, [](int64_t, int64_t) {});
      amx_sums<Weight>(task, o, count, rows, [&](int64_t block, int64_t last) {
        for (; block < last; ++block) finish_block(task, rows.sums, gates.sums, block, o, count);
      });
    }
    Amx::end();
  }

  static void finish_block(const LinearTask& task, const float* sums, const float* gates, int64_t block, int64_t first,
                           int64_t count) {
    alignas(64) float of_inputs[kAmxInputs * kManyAmxOutputs], gates_of_inputs[kAmxInputs * kManyAmxOutputs];
    const int64_t stride = amx_blocks(task.inputs) * kAmxSums;
    by_inputs(sums + block * kAmxSums, stride, count, of_inputs);
    if (gates) by_inputs(gates + block * kAmxSums, stride, count, gates_of_inputs);
    const int64_t input = block * kAmxInputs, left = task.inputs - input;
    finish<BFloat16>(task, {of_inputs, gates ? gates_of_inputs : nullptr, kManyAmxOutputs}, input,
                     left < kAmxInputs ? left : kAmxInputs, first, count);
  }
};

bool has_amx_for(const LinearLayer& layer) {
  return layer.columns > 0 && layer.columns / layer.groups % kAmxColumns == 0;
}
AmxLoop choose_by_amx(bool quantized, bool int4) {
  if (int4) return LinearByAmx<Int4Pair>::run;
  return quantized ? LinearByAmx<int8_t>::run : LinearByAmx<BFloat16>::run;
}
#else
bool has_amx_for(const LinearLayer&) { return false; }
AmxLoop choose_by_amx(bool, bool) { return nullptr; }
constexpr PairLoop pair_inputs = nullptr;
#endif

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

bool uses_tiles(const LinearLayer& layer) {
  return has_tiles(layer) && layer.inputs >= least_tile_inputs(layer.scales != nullptr);
}

// Of an input: few inputs meet int4 weights as bytes.
int64_t bytes_of_input(const LinearLayer& layer) {
  return layer.int4 && !uses_tiles(layer) ? layer.groups * bytes_of(layer.columns / layer.groups) : 0;
}

bool shorten_inputs(const LinearTask& task, int16_t* values, float* scales, int32_t* eights, uint8_t* bytes) {
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
    if (bytes) split_bytes(to, width, bytes + group * bytes_of(width));
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
inline bool narrows_by_instruction() {
  static const bool known = has_avx512_bf16();
  return known;
}
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
  static constexpr LinearLoops all{choose_linear,  by_dtype<LinearWiden>, has_tiles,   uses_tiles,    bytes_of_input,
                                   shorten_inputs, sum_groups,            has_amx_for, choose_by_amx, pair_inputs};
  return all;
}

}  // namespace ds_kernels::cpu
