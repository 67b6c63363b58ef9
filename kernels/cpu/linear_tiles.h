// Products of weights with many inputs, by AVX-512 or AVX2: of int8 and int4 weights in 16 bits, of which an instruction
// multiplies twice as many as there are floats; of others in floats.
//
// A vector has a column, or two, of as many rows as it has lanes, so that the sums of so many outputs are one vector, and a
// group's scale costs as little as it can. Weights are laid out that way a few at a time; all inputs pass by them while
// they are in the first cache.
#pragma once

#include <ds_kernels/linear.h>

#include <type_traits>

#include "linear_loops.h"

namespace ds_kernels {
inline namespace DS_KERNELS_CPU_LEVEL {

#if defined(__AVX2__)
constexpr bool kTiles = true;
// Outputs of a tile: two vectors of sums.
constexpr int64_t kTileRows = 2 * kLanes;
// Columns that are laid out at a time, of one group.
constexpr int64_t kTileColumns = 128;
// How far ahead of a row's weights others are fetched, in bytes.
constexpr int64_t kTileAhead = 128;

// ---- what differs between the two ---------------------------------------------------------------------------------

#if defined(__AVX512F__)
// Inputs whose sums are in registers, of 32, beside two vectors of weights and an input.
constexpr int kTileInputs = 12;
constexpr int kTileInputsInFloats = 12;

DS_KERNELS_INLINE ShortVector in_all_lanes(int32_t pair) { return _mm512_set1_epi32(pair); }
DS_KERNELS_INLINE Floats in_all_lanes(float value) { return (Floats)_mm512_set1_ps(value); }

// The first `bytes` of a row, one or more, and zeros behind them; zeros of a row that is not there.
DS_KERNELS_INLINE ShortVector load_row(const void* row, bool there, int64_t bytes) {
  const __mmask64 mask = ~uint64_t{0} >> (kVectorBytes - bytes);
  return _mm512_maskz_loadu_epi8(there ? mask : 0, row);
}

// The low halves of each 32 bits.
DS_KERNELS_INLINE Halves low_halves(ShortVector pairs) { return (Halves)_mm512_maskz_cvtepi32_epi16(0xffff, pairs); }

// Rows of kLanes elements of 32 bits become columns.
DS_KERNELS_INLINE void transpose(ShortVector (&rows)[kLanes]) {
  ShortVector twos[16], fours[16];
  DS_KERNELS_UNROLL
  for (int i = 0; i < 16; i += 2) {
    twos[i] = _mm512_maskz_unpacklo_epi32(0xffff, rows[i], rows[i + 1]);
    twos[i + 1] = _mm512_maskz_unpackhi_epi32(0xffff, rows[i], rows[i + 1]);
  }
  DS_KERNELS_UNROLL
  for (int i = 0; i < 16; i += 4) {
    fours[i] = _mm512_maskz_unpacklo_epi64(0xff, twos[i], twos[i + 2]);
    fours[i + 1] = _mm512_maskz_unpackhi_epi64(0xff, twos[i], twos[i + 2]);
    fours[i + 2] = _mm512_maskz_unpacklo_epi64(0xff, twos[i + 1], twos[i + 3]);
    fours[i + 3] = _mm512_maskz_unpackhi_epi64(0xff, twos[i + 1], twos[i + 3]);
  }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // of the four parts of 128 bits
  DS_KERNELS_UNROLL
  for (int i = 0; i < 4; ++i) {
    const ShortVector even[] = {_mm512_maskz_shuffle_i32x4(0xffff, fours[i], fours[4 + i], kEven),
                                _mm512_maskz_shuffle_i32x4(0xffff, fours[8 + i], fours[12 + i], kEven)};
    const ShortVector odd[] = {_mm512_maskz_shuffle_i32x4(0xffff, fours[i], fours[4 + i], kOdd),
                               _mm512_maskz_shuffle_i32x4(0xffff, fours[8 + i], fours[12 + i], kOdd)};
    rows[i] = _mm512_maskz_shuffle_i32x4(0xffff, even[0], even[1], kEven);
    rows[4 + i] = _mm512_maskz_shuffle_i32x4(0xffff, odd[0], odd[1], kEven);
    rows[8 + i] = _mm512_maskz_shuffle_i32x4(0xffff, even[0], even[1], kOdd);
    rows[12 + i] = _mm512_maskz_shuffle_i32x4(0xffff, odd[0], odd[1], kOdd);
  }
}

// The inner two of each four bytes change places.
DS_KERNELS_INLINE ShortVector swap_inner_bytes(ShortVector bytes) {
  const ShortVector places = _mm512_maskz_broadcast_i32x4(
      0xffff, _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  return _mm512_maskz_shuffle_epi8(~uint64_t{0}, bytes, places);
}
#else
constexpr int kTileInputs = 5;  // of 16, and a product waits in one
constexpr int kTileInputsInFloats = 6;

DS_KERNELS_INLINE ShortVector in_all_lanes(int32_t pair) { return _mm256_set1_epi32(pair); }
DS_KERNELS_INLINE Floats in_all_lanes(float value) { return (Floats)_mm256_set1_ps(value); }

DS_KERNELS_INLINE ShortVector load_row(const void* row, bool there, int64_t bytes) {
  ShortVector all{};
  if (there && bytes == kVectorBytes) {
    __builtin_memcpy(&all, row, kVectorBytes);
  } else if (there) {
    __builtin_memcpy(&all, row, bytes);  // a call
  }
  return all;
}

DS_KERNELS_INLINE Halves low_halves(ShortVector pairs) { return __builtin_convertvector((Words)pairs, Halves); }

DS_KERNELS_INLINE void transpose(ShortVector (&rows)[kLanes]) {
  ShortVector twos[8], fours[8];
  DS_KERNELS_UNROLL
  for (int i = 0; i < 8; i += 2) {
    twos[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    twos[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  DS_KERNELS_UNROLL
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_unpacklo_epi64(twos[i], twos[i + 2]);
    fours[i + 1] = _mm256_unpackhi_epi64(twos[i], twos[i + 2]);
    fours[i + 2] = _mm256_unpacklo_epi64(twos[i + 1], twos[i + 3]);
    fours[i + 3] = _mm256_unpackhi_epi64(twos[i + 1], twos[i + 3]);
  }
  constexpr int kLow = 0x20, kHigh = 0x31;  // of the two halves
  DS_KERNELS_UNROLL
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], kLow);
    rows[4 + i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], kHigh);
  }
}

DS_KERNELS_INLINE ShortVector swap_inner_bytes(ShortVector bytes) {
  const ShortVector places = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  return _mm256_shuffle_epi8(bytes, places);
}
#endif

// ---- weights by columns -------------------------------------------------------------------------------------------

// Two columns of kTileRows rows, with inputs in 16 bits.
struct PairOfColumns {
  using Vector = ShortVector;
  static constexpr int64_t kColumns = 2;
  static constexpr int kInputs = kTileInputs;
  int16_t values[kTileRows][kColumns];

  static DS_KERNELS_INLINE Vector in_all_lanes(const int16_t* input) {
    int32_t pair;
    __builtin_memcpy(&pair, input, sizeof pair);
    return DS_KERNELS_CPU_LEVEL::in_all_lanes(pair);
  }
  static DS_KERNELS_INLINE Vector add(Vector sums, Vector weights, Vector input) {
    return add_pairs(sums, weights, input);
  }
  static DS_KERNELS_INLINE Floats floats(Vector sums) { return floats_of(sums); }
};

// A column, with inputs in floats.
struct Column {
  using Vector = Floats;
  static constexpr int64_t kColumns = 1;
  static constexpr int kInputs = kTileInputsInFloats;
  float values[kTileRows];

  static DS_KERNELS_INLINE Vector in_all_lanes(const float* input) { return DS_KERNELS_CPU_LEVEL::in_all_lanes(*input); }
  static DS_KERNELS_INLINE Vector add(Vector sums, Vector weights, Vector input) { return sums + weights * input; }
  static DS_KERNELS_INLINE Floats floats(Vector sums) { return sums; }
};

// What a tile of weights consists of.
template <class Weight>
using ColumnsOf = std::conditional_t<sizeof(Weight) == 1, PairOfColumns, Column>;

template <class Columns>
DS_KERNELS_INLINE void store_half(Columns& columns, int64_t first_row, typename Columns::Vector values) {
  __builtin_memcpy(&columns.values[first_row], &values, sizeof values);
}

// Element i of the result has bytes 4 i to 4 i + 3 of kLanes rows, `bytes` of each; zeros for rows from `rows` on.
DS_KERNELS_INLINE void load_columns(const void* from, int64_t stride, int64_t rows, int64_t bytes,
                                    ShortVector (&columns)[kLanes]) {
  DS_KERNELS_UNROLL
  for (int r = 0; r < kLanes; ++r) {
    const char* row = static_cast<const char*>(from) + r * stride;
    columns[r] = load_row(row, r < rows, bytes);
    prefetch(row, kTileAhead);
  }
  transpose(columns);
}

// 16-bit integers, whose shifts to the right keep the sign.
typedef int16_t Shorts __attribute__((vector_size(kVectorBytes)));

// A vector's columns of int8 weights, or fewer, of kLanes rows.
DS_KERNELS_INLINE void lay_out(const int8_t* from, int64_t stride, int64_t rows, int64_t count, PairOfColumns* to,
                               int64_t first_row) {
  ShortVector fours[kLanes];
  load_columns(from, stride, rows, count, fours);
  for (int64_t i = 0; i < count / 4; ++i) {
    const Shorts bytes = (Shorts)swap_inner_bytes(fours[i]);  // for shifts make 16 bits of every second one
    store_half(to[2 * i], first_row, (ShortVector)(bytes << 8 >> 8));
    store_half(to[2 * i + 1], first_row, (ShortVector)(bytes >> 8));
  }
}

// A vector's columns of int4 weights, or fewer, whole blocks.
DS_KERNELS_INLINE void lay_out(const Int4Pair* from, int64_t stride, int64_t rows, int64_t count, PairOfColumns* to,
                               int64_t first_row) {
  typedef uint16_t Levels __attribute__((vector_size(kVectorBytes)));
  ShortVector words[kLanes];
  load_columns(from, stride, rows, count / 2, words);
  for (int64_t block = 0; block < count / kInt4Block; ++block) {
    for (int64_t i = 0; i < 8; ++i) {
      Levels levels = (Levels)words[8 * block + i];
      for (int64_t k = 0; k < 4; ++k) {
        store_half(to[32 * block + 8 * k + i], first_row, (ShortVector)((levels & 15) - 8));
        levels >>= 4;
      }
    }
  }
}

// The floats of 16-bit ones in the low halves, and in the high ones.
DS_KERNELS_INLINE Floats low_floats(ShortVector pairs, BFloat16) { return (Floats)((Words)pairs << 16); }
DS_KERNELS_INLINE Floats high_floats(ShortVector pairs, BFloat16) { return (Floats)((Words)pairs & 0xffff0000u); }
DS_KERNELS_INLINE Floats low_floats(ShortVector pairs, Float16) { return widen_float16(low_halves(pairs)); }
DS_KERNELS_INLINE Floats high_floats(ShortVector pairs, Float16 type) {
  return low_floats((ShortVector)((Words)pairs >> 16), type);
}

// A vector's columns of 16-bit floats, or fewer.
template <class Half>
DS_KERNELS_INLINE void lay_out(const Half* from, int64_t stride, int64_t rows, int64_t count, Column* to,
                               int64_t first_row) {
  ShortVector pairs[kLanes];
  load_columns(from, stride * 2, rows, count * 2, pairs);
  for (int64_t i = 0; i < count; i += 2) {
    store_half(to[i], first_row, low_floats(pairs[i / 2], Half{}));
    if (i + 1 < count) store_half(to[i + 1], first_row, high_floats(pairs[i / 2], Half{}));
  }
}

// A vector's columns of floats, or fewer.
DS_KERNELS_INLINE void lay_out(const float* from, int64_t stride, int64_t rows, int64_t count, Column* to,
                               int64_t first_row) {
  ShortVector columns[kLanes];
  load_columns(from, stride * 4, rows, count * 4, columns);
  for (int64_t i = 0; i < count; ++i) store_half(to[i], first_row, (Floats)columns[i]);
}

// Columns of a vector; elements of columns.
template <class Weight>
constexpr int64_t columns_in_vector = kVectorBytes / sizeof(Weight);
template <>
constexpr int64_t columns_in_vector<Int4Pair> = 2 * kVectorBytes;
template <class Weight>
constexpr int64_t elements_of(int64_t columns) {
  return std::is_same_v<Weight, Int4Pair> ? columns / 2 : columns;
}

// Up to kTileColumns columns of up to kTileRows rows.
template <class Weight>
DS_KERNELS_INLINE void lay_out_tile(const Weight* from, int64_t stride, int64_t rows, int64_t columns,
                                    ColumnsOf<Weight>* to) {
  constexpr int64_t most = columns_in_vector<Weight>;
  for (int64_t r = 0; r < kTileRows; r += kLanes) {
    for (int64_t c = 0; c < columns; c += most) {
      lay_out(from + r * stride + elements_of<Weight>(c), stride, rows - r, columns - c < most ? columns - c : most,
              to + c / ColumnsOf<Weight>::kColumns, r);
    }
  }
}

// What up to kTileRows rows have for a group, of [rows, groups].
struct OfRows {
  Floats halves[2];

  OfRows(const float* all, const cpu::LinearTask& task, int64_t first, int64_t rows, int64_t group) {
    float values[kTileRows] = {};
    for (int64_t r = 0; r < rows; ++r) values[r] = all[(first + r) * task.groups + group];
    halves[0] = load(values);
    halves[1] = load(values + kLanes);
  }
};

// Adds what the offsets of a group make of all inputs to their sums.
DS_KERNELS_INLINE void add_offsets(const OfRows& offsets, const cpu::LinearTask& task, int64_t group, float* sums) {
  for (int64_t m = 0; m < task.inputs; ++m) {
    const float sum = task.group_sums[m * task.groups + group];
    DS_KERNELS_UNROLL
    for (int half = 0; half < 2; ++half) {
      float* to = sums + m * kTileRows + half * kLanes;
      store_bits(to, load(to) + offsets.halves[half] * sum);
    }
  }
}

// What sums of products are multiplied with: the scales of a group of the rows, and of each input.
struct TileScales {
  OfRows rows;
  const float* inputs;
  int64_t stride;

  DS_KERNELS_INLINE Floats times(Floats sums, int64_t input, int half) const {
    return rows.halves[half] * (inputs[input * stride] * sums);  // both scales may be tiny
  }
};
struct NoScales {
  DS_KERNELS_INLINE Floats times(Floats sums, int64_t, int) const { return sums; }
};

// Adds the products of `inputs` inputs to their sums, [inputs, kTileRows].
template <int inputs, class Columns, class Input, class Scales>
DS_KERNELS_INLINE void add_tile(const Columns* weights, int64_t columns, const Input* input, int64_t stride,
                                const Scales& scales, float* sums) {
  typename Columns::Vector products[inputs][2] = {};
  for (int64_t c = 0; c < columns; c += Columns::kColumns) {
    const Columns& of_rows = weights[c / Columns::kColumns];
    typename Columns::Vector first, second;
    __builtin_memcpy(&first, of_rows.values, sizeof first);
    __builtin_memcpy(&second, of_rows.values + kTileRows / 2, sizeof second);
    DS_KERNELS_UNROLL
    for (int m = 0; m < inputs; ++m) {
      const auto value = Columns::in_all_lanes(input + m * stride + c);
      products[m][0] = Columns::add(products[m][0], first, value);
      products[m][1] = Columns::add(products[m][1], second, value);
    }
  }
  DS_KERNELS_UNROLL
  for (int m = 0; m < inputs; ++m) {
    DS_KERNELS_UNROLL
    for (int half = 0; half < 2; ++half) {
      float* to = sums + m * kTileRows + half * kLanes;
      store_bits(to, load(to) + scales.times(Columns::floats(products[m][half]), m, half));
    }
  }
}

// The same for as many of `left` inputs as there may be, at most `most`; gives how many these are.
template <int most, class... All>
DS_KERNELS_INLINE int64_t add_tiles(int64_t left, const All&... all) {
  if constexpr (most > 1) {
    if (left < most) return add_tiles<most - 1>(left, all...);
  }
  add_tile<most>(all...);
  return most;
}

// The sums of up to kTileRows rows from `first` on with all inputs, [inputs, kTileRows]. Not inline: each copy takes long
// to compile.
template <class Weight>
__attribute__((noinline)) void tile_sums(const cpu::LinearTask& task, int64_t first, int64_t rows, float* sums) {
  using Columns = ColumnsOf<Weight>;
  const int64_t width = task.columns / task.groups;
  const auto* weight = static_cast<const Weight*>(task.weight) + first * task.stride;
  for (int64_t i = 0; i < task.inputs * kTileRows; ++i) sums[i] = 0;
  for (int64_t column = 0; column < task.columns;) {
    const int64_t left = width - column % width, columns = left < kTileColumns ? left : kTileColumns;
    alignas(64) Columns laid_out[kTileColumns / Columns::kColumns];
    lay_out_tile(weight + elements_of<Weight>(column), task.stride, rows, columns, laid_out);
    const auto add_all = [&](const auto* input, auto scales) {
      for (int64_t m = 0; m < task.inputs;) {
        const int64_t count = add_tiles<Columns::kInputs>(task.inputs - m, laid_out, columns, input + m * task.columns + column,
                                            task.columns, scales, sums + m * kTileRows);
        if constexpr (sizeof(Weight) == 1) scales.inputs += count * scales.stride;
        m += count;
      }
    };
    if constexpr (sizeof(Weight) == 1) {
      const int64_t group = column / width;
      const OfRows scales(task.scales, task, first, rows, group);
      add_all(task.shorts.values, TileScales{scales, task.shorts.scales + group, task.groups});
      if (task.offsets && column % width == 0) {
        add_offsets(OfRows(task.offsets, task, first, rows, group), task, group, sums);
      }
    } else {
      add_all(task.widened, NoScales{});
    }
    column += columns;
  }
}
#else
constexpr bool kTiles = false;
constexpr int64_t kTileRows = 1;
template <class Weight>
void tile_sums(const cpu::LinearTask& task, int64_t first, int64_t rows, float* sums);  // not there
#endif

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
