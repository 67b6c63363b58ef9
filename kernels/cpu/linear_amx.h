// Products of weights with many inputs in bfloat16 by AMX: an instruction multiplies 16 rows of 32 weights with 16 inputs.
//
// Its registers have 16 rows of 64 bytes. Weights are laid out for them a few at a time, as they are made bfloat16, and all
// inputs, whose columns lie in pairs, meet them.
#pragma once

#include <type_traits>

#include "amx.h"
#include "linear_loops.h"
#include "linear_tiles.h"

namespace ds_kernels {
inline namespace DS_KERNELS_CPU_LEVEL {

#if defined(__AVX512F__)

// Columns of all rows of a block that are laid out before the next ones.
constexpr int64_t kAmxPart = 128;
// Floats of the sums of a block of outputs with one of inputs, [2, kAmxRows, kAmxInputs].
constexpr int64_t kAmxSums = cpu::kAmxOutputs * cpu::kAmxInputs;
static_assert(cpu::kAmxInputs == kAmxRows && kLanes == kAmxRows, "sums are transposed in registers");
static_assert(cpu::kAmxOutputs == 2 * kAmxRows, "with two blocks of inputs their sums are in registers");

// Blocks [begin, end) of inputs: columns in pairs, [columns / 2, kAmxInputs, 2].
inline void pair_inputs(const LinearLayer& layer, int64_t begin, int64_t end, uint16_t* to) {
  to += begin * cpu::kAmxInputs * layer.columns;
  for (int64_t first = begin * cpu::kAmxInputs; first < end * cpu::kAmxInputs; first += cpu::kAmxInputs) {
    const auto* from = static_cast<const uint16_t*>(layer.input) + first * layer.columns;
    for (int64_t c = 0; c < layer.columns; c += kAmxColumns, to += kAmxElements) {
      ShortVector pairs[kLanes];
      load_columns(from + c, layer.columns * 2, layer.inputs - first, kVectorBytes, pairs);
      __builtin_memcpy(to, pairs, sizeof pairs);
    }
  }
}

// ---- weights in bfloat16 -------------------------------------------------------------------------------------------

// Where a row's columns are in what is laid out: [columns / kAmxColumns, kAmxOutputs, kAmxColumns].
struct AmxRow {
  uint16_t* to;
  DS_KERNELS_INLINE void put(int64_t column, ShortVector values) const {
    __builtin_memcpy(to + column * cpu::kAmxOutputs, &values, sizeof values);
  }
};

DS_KERNELS_INLINE ShortVector both(__m256i low, __m256i high) {
  return _mm512_maskz_inserti64x4(0xff, _mm512_maskz_broadcast_i64x4(0x0f, low), high, 1);
}

// `count` columns of a group of a row, whole steps of them.
DS_KERNELS_INLINE void lay_out_part(const int8_t* from, int64_t count, float scale, float, AmxRow to) {
  for (int64_t c = 0; c < count; c += kAmxColumns) {
    const Floats low = scale * PlainVector{}.load(from + c), high = scale * PlainVector{}.load(from + c + kLanes);
    to.put(c, both(Amx::narrow(low), Amx::narrow(high)));
  }
}

DS_KERNELS_INLINE void lay_out_part(const Int4Pair* from, int64_t count, float scale, float offset, AmxRow to) {
  const Floats levels = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  constexpr __mmask32 all = ~0u;
  const __m256i values = Amx::narrow(levels * scale + offset);
  // An instruction sees five bits of a word. The table has all values twice, so that the fifth says nothing.
  const ShortVector table = both(values, values);
  const ShortVector by_4 = both(__m256i{}, _mm256_set1_epi16(4)), by_8 = _mm512_set1_epi16(8);
  for (int64_t c = 0; c < count; c += kInt4Block) {
    const auto* block = reinterpret_cast<const __m256i*>(from + c / 2);
    const ShortVector words = _mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256(block));
    const ShortVector low = _mm512_maskz_srlv_epi16(all, words, by_4), high = _mm512_maskz_srlv_epi16(all, low, by_8);
    to.put(c, _mm512_maskz_permutexvar_epi16(all, low, table));
    to.put(c + kAmxColumns, _mm512_maskz_permutexvar_epi16(all, high, table));
  }
}

DS_KERNELS_INLINE void lay_out_part(const BFloat16* from, int64_t count, float, float, AmxRow to) {
  for (int64_t c = 0; c < count; c += kAmxColumns) {
    ShortVector values;
    __builtin_memcpy(&values, from + c, sizeof values);
    to.put(c, values);
  }
}

// Fetches `bytes` of what is laid out next, `ahead` bytes further on, into the second cache.
DS_KERNELS_INLINE void fetch_next(const void* from, int64_t ahead, int64_t bytes) {
  const uintptr_t next = reinterpret_cast<uintptr_t>(from) + ahead;
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(reinterpret_cast<const void*>(next + at), 0, 2);
}

// Columns [begin, end) of up to kAmxOutputs rows from `first` on, kAmxPart of them of all rows at a time. What is laid out next is
// `ahead` bytes further on.
template <class Weight>
DS_KERNELS_INLINE void lay_out_rows(const cpu::LinearTask& task, int64_t first, int64_t rows, int64_t begin, int64_t end,
                                    int64_t ahead, uint16_t* to) {
  const auto* weight = static_cast<const Weight*>(task.weight) + first * task.stride;
  const int64_t width = task.columns / task.groups;
  if (rows < cpu::kAmxOutputs) __builtin_memset(to, 0, cpu::kAmxOutputs * (end - begin) * sizeof *to);
  for (int64_t c = begin, next; c < end; c = next) {
    const int64_t group = c / width, end_of_group = (group + 1) * width;
    next = c + kAmxPart;
    if (next > end_of_group) next = end_of_group;
    if (next > end) next = end;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (first + r) * task.groups + group;
      const Weight* from = weight + r * task.stride + elements_of<Weight>(c);
      fetch_next(from, ahead, elements_of<Weight>(next - c) * sizeof(Weight));
      lay_out_part(from, next - c, task.scales ? task.scales[at] : 1.f, task.offsets ? task.offsets[at] : 0.f,
                   AmxRow{to + (c - begin) * cpu::kAmxOutputs + r * kAmxColumns});
    }
  }
}

// ---- products -----------------------------------------------------------------------------------------------------

// Adds the products of a block of weights with one or two blocks of inputs to their sums, or begins these.
template <int blocks>
DS_KERNELS_INLINE void add_blocks(const uint16_t* weights, int64_t columns, const uint16_t* inputs, int64_t stride,
                                  bool begins, float* sums) {
  constexpr int64_t half = kAmxSums / 2;
  constexpr bool two = blocks == 2;
  if (begins) {
    Amx::clear<0>();
    Amx::clear<1>();
    if constexpr (two) Amx::clear<2>(), Amx::clear<3>();
  } else {
    Amx::load<0>(sums);
    Amx::load<1>(sums + half);
    if constexpr (two) Amx::load<2>(sums + kAmxSums), Amx::load<3>(sums + kAmxSums + half);
  }
  for (int64_t c = 0; c < columns; c += kAmxColumns) {
    const uint16_t *rows = weights + c * cpu::kAmxOutputs, *pairs = inputs + c * cpu::kAmxInputs;
    Amx::load<4>(rows);
    Amx::load<6>(pairs);
    Amx::add<0, 4, 6>();
    if constexpr (two) {
      Amx::load<7>(pairs + stride);
      Amx::add<2, 4, 7>();
    }
    Amx::load<5>(rows + kAmxElements);
    Amx::add<1, 5, 6>();
    if constexpr (two) Amx::add<3, 5, 7>();
  }
  Amx::store<0>(sums);
  Amx::store<1>(sums + half);
  if constexpr (two) Amx::store<2>(sums + kAmxSums), Amx::store<3>(sums + kAmxSums + half);
}

// Where laid out weights and sums are in the room of a loop, of which amx_room() is the size.
struct AmxRoom {
  uint16_t* laid_out;  // blocks of outputs, each of columns at once
  float* sums;         // blocks of outputs, each of blocks of inputs, each kAmxSums
};

// The sums of some rows from `first` on with all inputs. `finish(begin, end)` is called for some blocks of inputs as soon as they are
// done.
template <class Weight, class Finish>
DS_KERNELS_INLINE void amx_sums(const cpu::LinearTask& task, int64_t first, int64_t rows, const AmxRoom& room, Finish finish) {
  const int64_t blocks = cpu::amx_blocks(task.inputs), stride = cpu::kAmxInputs * task.columns;
  const int64_t row_blocks = (rows + cpu::kAmxOutputs - 1) / cpu::kAmxOutputs;
  const int64_t at_once = cpu::amx_columns_at_once(task.inputs), laid_out = cpu::kAmxOutputs * at_once;
  for (int64_t begin = 0; begin < task.columns; begin += at_once) {
    const bool last = task.columns - begin <= at_once;
    const int64_t end = last ? task.columns : begin + at_once;
    // These rows' next columns, or the next rows' first.
    const int64_t ahead = last ? rows * task.stride - elements_of<Weight>(begin) : elements_of<Weight>(end - begin);
    for (int64_t row_block = 0; row_block < row_blocks; ++row_block) {
      const int64_t row = row_block * cpu::kAmxOutputs, left = rows - row;
      lay_out_rows<Weight>(task, first + row, left < cpu::kAmxOutputs ? left : cpu::kAmxOutputs, begin, end,
                           ahead * sizeof(Weight), room.laid_out + row_block * laid_out);
    }
    for (int64_t block = 0, next; block < blocks; block = next) {
      const uint16_t* inputs = task.pairs + begin * cpu::kAmxInputs + block * stride;
      next = block + 2 <= blocks ? block + 2 : blocks;
      for (int64_t row_block = 0; row_block < row_blocks; ++row_block) {
        const uint16_t* weights = room.laid_out + row_block * laid_out;
        float* sums = room.sums + (row_block * blocks + block) * kAmxSums;
        if (next - block == 2) {
          add_blocks<2>(weights, end - begin, inputs, stride, begin == 0, sums);
        } else {
          add_blocks<1>(weights, end - begin, inputs, stride, begin == 0, sums);
        }
      }
      if (last) finish(block, next);
    }
  }
}

// The sums of some outputs with a block of inputs, whose sums with the next outputs are `stride` further on, by inputs:
// [kAmxInputs, kManyAmxOutputs].
DS_KERNELS_INLINE void by_inputs(const float* sums, int64_t stride, int64_t outputs, float* to) {
  for (int64_t o = 0; o < outputs; o += kAmxRows) {
    ShortVector rows[kLanes];
    __builtin_memcpy(rows, sums + o / cpu::kAmxOutputs * stride + o % cpu::kAmxOutputs * kAmxRows, sizeof rows);
    transpose(rows);
    for (int64_t m = 0; m < kLanes; ++m) __builtin_memcpy(to + m * cpu::kManyAmxOutputs + o, &rows[m], sizeof rows[m]);
  }
}

#endif

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
