// Products of int8 and int4 weights with many inputs in 16 bits, by AVX512-VNNI: twice as many in an instruction as of
// floats.
//
// A vector has two columns of 16 rows, so that the sums of 16 outputs are one vector, and a group's scale costs as little
// as it can. Weights are laid out that way a few at a time; all inputs pass by them while they are in the first cache.
#pragma once

#include <ds_kernels/linear.h>

#include "linear_loops.h"

namespace ds_kernels {
inline namespace DS_KERNELS_CPU_LEVEL {

// Outputs of a tile: two vectors of sums.
constexpr int64_t kTileRows = 32;
// Columns that are laid out at a time, of one group.
constexpr int64_t kTileColumns = 128;
// From this many inputs on laying weights out takes less time than it saves, also where they come from memory.
constexpr int64_t kLeastTileInputs = 5;
// Inputs at a time: their sums, too, shall be in the first cache.
constexpr int64_t kMostTileInputs = 128;

#if defined(__AVX512F__)
constexpr bool kTiles = true;

// 32 rows of two columns each.
struct PairOfColumns {
  int16_t values[kTileRows][2];
};

DS_KERNELS_INLINE void store_half(PairOfColumns& pair, int64_t first_row, ShortVector values) {
  __builtin_memcpy(pair.values[first_row], &values, sizeof values);
}

// Rows of 16 elements of 32 bits become columns.
DS_KERNELS_INLINE void transpose(ShortVector (&rows)[16]) {
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

// Element i of the result has bytes 4 i to 4 i + 3 of 16 rows, `bytes` of each, at most 64; zeros for rows from `rows` on.
DS_KERNELS_INLINE void load_columns(const void* from, int64_t stride, int64_t rows, int64_t bytes,
                                    ShortVector (&columns)[16]) {
  const __mmask64 mask = ~uint64_t{0} >> (64 - bytes);
  DS_KERNELS_UNROLL
  for (int r = 0; r < 16; ++r) {
    const char* row = static_cast<const char*>(from) + r * stride;
    columns[r] = _mm512_maskz_loadu_epi8(r < rows ? mask : 0, row);
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(row) + kTileColumns));
  }
  transpose(columns);
}

// 64 columns of int8 weights, or fewer, of 16 rows.
DS_KERNELS_INLINE void lay_out(const int8_t* from, int64_t stride, int64_t rows, int64_t count, PairOfColumns* to,
                               int64_t first_row) {
  ShortVector fours[16];
  load_columns(from, stride, rows, count, fours);
  // The inner two of each four bytes change places, for shifts make 16 bits of every second one.
  const ShortVector places = _mm512_maskz_broadcast_i32x4(
      0xffff, _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  for (int64_t i = 0; i < count / 4; ++i) {
    const ShortVector bytes = _mm512_maskz_shuffle_epi8(~uint64_t{0}, fours[i], places);
    store_half(to[2 * i], first_row, _mm512_maskz_srai_epi16(~0u, _mm512_maskz_slli_epi16(~0u, bytes, 8), 8));
    store_half(to[2 * i + 1], first_row, _mm512_maskz_srai_epi16(~0u, bytes, 8));
  }
}

// 128 columns of int4 weights, or 64.
DS_KERNELS_INLINE void lay_out(const Int4Pair* from, int64_t stride, int64_t rows, int64_t count, PairOfColumns* to,
                               int64_t first_row) {
  ShortVector words[16];
  load_columns(from, stride, rows, count / 2, words);
  const ShortVector mask = _mm512_set1_epi16(15), eight = _mm512_set1_epi16(8);
  for (int64_t block = 0; block < count / kInt4Block; ++block) {
    for (int64_t i = 0; i < 8; ++i) {
      ShortVector levels = words[8 * block + i];
      for (int64_t k = 0; k < 4; ++k) {
        store_half(to[32 * block + 8 * k + i], first_row, _mm512_sub_epi16(_mm512_and_si512(levels, mask), eight));
        levels = _mm512_maskz_srli_epi16(~0u, levels, 4);
      }
    }
  }
}

// Columns of one instruction above.
constexpr int64_t columns_at_once(const int8_t*) { return 64; }
constexpr int64_t columns_at_once(const Int4Pair*) { return 128; }
constexpr int64_t elements_of(const int8_t*, int64_t columns) { return columns; }
constexpr int64_t elements_of(const Int4Pair*, int64_t columns) { return columns / 2; }

// Up to kTileColumns columns of up to kTileRows rows.
template <class Weight>
DS_KERNELS_INLINE void lay_out_tile(const Weight* from, int64_t stride, int64_t rows, int64_t columns,
                                    PairOfColumns* to) {
  constexpr int64_t most = columns_at_once(static_cast<const Weight*>(nullptr));
  for (int64_t r = 0; r < kTileRows; r += 16) {
    for (int64_t c = 0; c < columns; c += most) {
      lay_out(from + r * stride + elements_of(from, c), stride, rows - r, columns - c < most ? columns - c : most,
              to + c / 2, r);
    }
  }
}

// Adds the products of `inputs` inputs, times their scales and the rows', to their sums, [inputs, kTileRows].
template <int inputs>
DS_KERNELS_INLINE void add_tile(const PairOfColumns* weights, int64_t pairs, const int16_t* values,
                                int64_t values_stride, const Floats (&row_scales)[2], const float* scales,
                                int64_t scales_stride, float* sums) {
  ShortVector products[inputs][2] = {};
  for (int64_t p = 0; p < pairs; ++p) {
    ShortVector rows[2];
    __builtin_memcpy(rows, &weights[p], sizeof rows);
    DS_KERNELS_UNROLL
    for (int m = 0; m < inputs; ++m) {
      int32_t pair;
      __builtin_memcpy(&pair, values + m * values_stride + 2 * p, sizeof pair);
      const ShortVector both = _mm512_set1_epi32(pair);
      products[m][0] = add_pairs(products[m][0], rows[0], both);
      products[m][1] = add_pairs(products[m][1], rows[1], both);
    }
  }
  DS_KERNELS_UNROLL
  for (int m = 0; m < inputs; ++m) {
    const float scale = scales[m * scales_stride];
    DS_KERNELS_UNROLL
    for (int half = 0; half < 2; ++half) {
      float* to = sums + m * kTileRows + half * kLanes;
      store_bits(to, load(to) + row_scales[half] * scale * floats_of(products[m][half]));
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
  const int64_t width = task.columns / task.groups;
  const auto* weight = static_cast<const Weight*>(task.weight) + first * task.stride;
  for (int64_t i = 0; i < task.inputs * kTileRows; ++i) sums[i] = 0;
  for (int64_t group = 0; group < task.groups; ++group) {
    float scales[kTileRows] = {};
    for (int64_t r = 0; r < rows; ++r) scales[r] = task.scales[(first + r) * task.groups + group];
    const Floats row_scales[] = {load(scales), load(scales + kLanes)};
    for (int64_t begin = 0; begin < width; begin += kTileColumns) {
      const int64_t columns = width - begin < kTileColumns ? width - begin : kTileColumns;
      const int64_t column = group * width + begin;
      PairOfColumns laid_out[kTileColumns / 2];
      lay_out_tile(weight + elements_of(weight, column), task.stride, rows, columns, laid_out);
      for (int64_t m = 0; m < task.inputs;) {
        m += add_tiles<12>(task.inputs - m, laid_out, columns / 2, task.shorts.values + m * task.columns + column,
                           task.columns, row_scales, task.shorts.scales + m * task.groups + group, task.groups,
                           sums + m * kTileRows);
      }
    }
  }
}
#else
constexpr bool kTiles = false;
template <class Weight>
void tile_sums(const cpu::LinearTask& task, int64_t first, int64_t rows, float* sums);  // not there
#endif

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
