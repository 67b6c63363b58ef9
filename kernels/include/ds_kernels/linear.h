// A linear layer: what the op asks of a device, and on CPUs the dot products of weights with inputs. No torch, no
// operating system.
//
//   y = activation(W x + b) + residual            gated:  y = h1 activation(h2) + residual,  [h1; h2] = W x + b
//
// Weights are floats of any storage type, or int8 or int4 with a scale for each group of columns, int4 also with an
// offset; sums are floats.
#pragma once

#include <ds_kernels/activation.h>

#include <type_traits>

namespace ds_kernels {

// ---- what is asked of a device -----------------------------------------------------------------------------------

// Two weights of 4 bits, each plus 8. Of each 64 columns of a row the 16 little-endian 16-bit words have columns j,
// 16 + j, 32 + j and 48 + j, from the lowest bits up: a vector of words becomes 16-bit integers by shifts and masks.
struct Int4Pair {
  uint8_t bits;
};
constexpr int64_t kInt4Block = 64;  // columns; a group has whole blocks

// A layer on some inputs. All but quantized weights and scales are of one dtype; absent ones are null.
struct LinearLayer {
  int64_t inputs, columns, outputs;
  const void* input;     // [inputs, columns]
  const void* weight;    // [rows, columns], rows being outputs, or twice as many if gated
  int64_t stride;        // of a row of weights, in elements, or in pairs; 0 before they are made contiguous
  bool int4;             // weights are Int4Pair
  const float* scales;   // [rows, groups] for int8 and int4 weights, else null
  const float* offsets;  // [rows, groups], added to each weight after its scale; null if none, and without int4
  int64_t groups;        // 1 without scales
  const void* bias;      // [rows]
  const void* residual;  // [inputs, outputs]
  void* output;          // [inputs, outputs]
  Activation activation;
  bool gated;
};

// Activation, gate and residual of sums with their bias, [inputs, rows], which may be the output.
struct LinearFinish {
  LinearLayer layer;
  const void* sums;
};

// Contiguous int8 or int4 weights to be made floats: to = weight * scale + offset of its group.
struct QuantizedRows {
  const void* weight;    // [rows, columns]
  const float* scales;   // [rows, groups]
  const float* offsets;  // the same, for int4, or null
  void* to;              // [rows, columns]
  int64_t rows, columns, groups;
  bool int4;
};

// ---- on CPUs -----------------------------------------------------------------------------------------------------

inline namespace DS_KERNELS_CPU_LEVEL {

#ifndef DS_KERNELS_GPU_COMPILER

// What rows of weights with inputs have in common.
struct Dots {
  int64_t columns;
  int64_t groups;   // of columns that share a scale; one if there are no scales
  int64_t width;    // columns of a group
  uintptr_t ahead;  // how far ahead of a row's columns weights are fetched, in bytes
};

// Rows of weights, and of their scales, which are null if there are none.
template <int rows, class Weight>
struct Rows {
  const Weight* weights[rows];
  const float* scales[rows];
};

// Adds the products of one vector of each row of weights with one of each input, from columns `at` and `input` on.
template <int rows, int inputs, class Memory, class Weight>
DS_KERNELS_INLINE void add_products(Floats (&sums)[rows][inputs], Memory memory, const Dots& dots,
                                    const Weight* const (&weights)[rows], int64_t at, const float* input) {
  Floats values[inputs];
  DS_KERNELS_UNROLL
  for (int m = 0; m < inputs; ++m) values[m] = memory.load(input + m * dots.columns);
  DS_KERNELS_UNROLL
  for (int r = 0; r < rows; ++r) {
    const Floats wide = memory.load(weights[r] + at);
    DS_KERNELS_UNROLL
    for (int m = 0; m < inputs; ++m) sums[r][m] += wide * values[m];
  }
}

// Adds the products of columns [begin, end).
template <int rows, int inputs, class Weight>
DS_KERNELS_INLINE void add_columns(Floats (&sums)[rows][inputs], const Dots& dots, int64_t begin, int64_t end,
                                   const Weight* const (&weights)[rows], const float* input) {
  constexpr int64_t line = 64 / sizeof(Weight) > kLanes ? 64 / sizeof(Weight) : kLanes;
  int64_t i = begin;
  for (; i + line <= end; i += line) {
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) prefetch(weights[r] + i, dots.ahead);
    for (int64_t k = i; k < i + line; k += kLanes) add_products(sums, PlainVector{}, dots, weights, k, input + k);
  }
  for (; i + kLanes <= end; i += kLanes) add_products(sums, PlainVector{}, dots, weights, i, input + i);
  if (i < end) add_products(sums, PartVector{end - i}, dots, weights, i, input + i);
}

template <int rows, int inputs>
DS_KERNELS_INLINE void put_sums(const Floats (&total)[rows][inputs], float* const (&sums)[rows], int64_t sums_stride) {
  DS_KERNELS_UNROLL
  for (int m = 0; m < inputs; ++m) {
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) sums[r][m * sums_stride] = sum_of(total[r][m]);
  }
}

// `sums[row][input * sums_stride]` for `rows` rows of weights and `inputs` inputs: the sums of one tile stay in registers,
// and each weight is widened once for all inputs.
template <int inputs, int rows, class Weight>
DS_KERNELS_INLINE void dot_tile(const Dots& dots, const Rows<rows, Weight>& from, const float* input,
                                float* const (&sums)[rows], int64_t sums_stride) {
  const int64_t width = dots.width;
  Floats total[rows][inputs] = {};
  for (int64_t group = 0; group < dots.groups; ++group) {
    Floats part[rows][inputs] = {};
    add_columns(part, dots, group * width, (group + 1) * width, from.weights, input);
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) {
      const float scale = from.scales[r] ? from.scales[r][group] : 1.f;
      DS_KERNELS_UNROLL
      for (int m = 0; m < inputs; ++m) total[r][m] += scale * part[r][m];
    }
  }
  put_sums(total, sums, sums_stride);
}

// The 64 weights of a block.
DS_KERNELS_INLINE void unpack(const Int4Pair* from, int8_t* to) {
  for (int j = 0; j < 16; ++j) {
    to[j] = static_cast<int8_t>((from[2 * j].bits & 15) - 8);
    to[16 + j] = static_cast<int8_t>((from[2 * j].bits >> 4) - 8);
    to[32 + j] = static_cast<int8_t>((from[2 * j + 1].bits & 15) - 8);
    to[48 + j] = static_cast<int8_t>((from[2 * j + 1].bits >> 4) - 8);
  }
}

// As above, for int4 weights.
template <int inputs, int rows>
DS_KERNELS_INLINE void dot_tile(const Dots& dots, const Rows<rows, Int4Pair>& from, const float* input,
                                float* const (&sums)[rows], int64_t sums_stride) {
  const int64_t width = dots.width;
  Floats total[rows][inputs] = {};
  for (int64_t group = 0; group < dots.groups; ++group) {
    Floats part[rows][inputs] = {};
    for (int64_t i = group * width; i < (group + 1) * width; i += kInt4Block) {
      int8_t wide[rows][kInt4Block];
      const int8_t* block[rows];
      for (int r = 0; r < rows; ++r) {
        unpack(from.weights[r] + i / 2, wide[r]);
        block[r] = wide[r];
      }
      for (int64_t k = 0; k < kInt4Block; k += kLanes) {
        add_products(part, PlainVector{}, dots, block, k, input + i + k);
      }
    }
    for (int r = 0; r < rows; ++r) {
      for (int m = 0; m < inputs; ++m) total[r][m] += from.scales[r][group] * part[r][m];
    }
  }
  put_sums(total, sums, sums_stride);
}

// ---- int8 and int4 weights with inputs in 16 bits ----------------------------------------------------------------
//
// AVX2 and AVX512-VNNI multiply and add pairs of 16-bit integers: a third of the instructions that floats take. Inputs
// that were 16-bit floats lose next to nothing: a group's scale is a power of two, so what is at least 2^-7 of the
// group's largest element (bfloat16) is exact, and the error of all others is below 2^-15 of that.

// Inputs in 16 bits: value * scale of its group.
struct ShortInputs {
  const int16_t* values;  // [inputs, columns]
  const float* scales;    // [inputs, groups]
  const int32_t* eights;  // [inputs, groups]: -8 times the sum of each group, which takes the 8 out of int4 weights
  const uint8_t* bytes;   // [inputs, groups, bytes_of(a group's columns)]: the values as split_bytes() puts them, or null
};

// Columns of one instruction.
constexpr int64_t kShortStep = kVectorBytes / 2;
// More columns in a group could overflow 32 bits: two in a lane at a time, each product at most 2^22.
constexpr int64_t kMostShortColumns = 128 * kShortStep;

#if defined(__AVX512F__)
constexpr bool kShortInputs = true;
typedef __m512i ShortVector;

DS_KERNELS_INLINE ShortVector load_bytes(const int8_t* from) {
  __m256i bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return _mm512_maskz_cvtepi8_epi16(0xffffffff, bytes);
}

// sums + products of pairs. By its name, so that this level's binary also runs where there is no such instruction:
// the binding asks the CPU before it makes short inputs.
DS_KERNELS_INLINE ShortVector add_pairs(ShortVector sums, ShortVector a, ShortVector b) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
  return sums;
}

DS_KERNELS_INLINE Floats floats_of(ShortVector sums) { return (Floats)_mm512_maskz_cvtepi32_ps(0xffff, sums); }

// sums + products of fours, of bytes without and with a sign.
DS_KERNELS_INLINE ShortVector add_fours(ShortVector sums, ShortVector bytes, ShortVector with_sign) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(with_sign));
  return sums;
}

#elif defined(__AVX2__)
constexpr bool kShortInputs = true;
typedef __m256i ShortVector;

DS_KERNELS_INLINE ShortVector load_bytes(const int8_t* from) {
  __m128i bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return _mm256_cvtepi8_epi16(bytes);
}

// sums + products of pairs. In assembly: otherwise GCC moves all products before the sums, and they do not fit into registers.
DS_KERNELS_INLINE ShortVector add_pairs(ShortVector sums, ShortVector a, ShortVector b) {
  ShortVector products;
  __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(a), "x"(b));
  return sums;
}

// sums + products of bytes without and with a sign, two of them added: all in 16 bits.
DS_KERNELS_INLINE ShortVector add_twos(ShortVector sums, ShortVector bytes, ShortVector with_sign) {
  ShortVector products;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(bytes), "x"(with_sign));
  return sums;
}

DS_KERNELS_INLINE Floats floats_of(ShortVector sums) { return (Floats)_mm256_cvtepi32_ps(sums); }

// The weights of a block, each plus 8.
constexpr int kPieces = 4;
DS_KERNELS_INLINE void unpack(const Int4Pair* from, ShortVector (&to)[kPieces]) {
  __m256i words;
  __builtin_memcpy(&words, from, sizeof words);
  const __m256i mask = _mm256_set1_epi16(15);
  to[0] = _mm256_and_si256(words, mask);
  to[1] = _mm256_and_si256(_mm256_srli_epi16(words, 4), mask);
  to[2] = _mm256_and_si256(_mm256_srli_epi16(words, 8), mask);
  to[3] = _mm256_srli_epi16(words, 12);
}
#else
constexpr bool kShortInputs = false;
#endif

#if defined(__AVX2__)
// Columns of a vector of int4 weights. By AVX-512 a group's last one may have half of them, which takes as long.
constexpr int64_t kFourStep = 2 * kVectorBytes;
DS_KERNELS_INLINE int64_t bytes_of(int64_t width) { return (width + kFourStep - 1) / kFourStep * kFourStep * 2; }

// A group's inputs in 16 bits as they are multiplied with int4 weights in bytes: four vectors for each kFourStep columns, the
// high bytes of those in weights' low halves, their low bytes, and the same of those in high halves. A value is 256 times its
// high byte, with a sign, plus its low byte: products of bytes, added up, are what products of 16 bits would be.
inline void split_bytes(const int16_t* values, int64_t width, uint8_t* to) {
  typedef uint16_t Words16 __attribute__((vector_size(32)));
  constexpr int64_t blocks = kFourStep / kInt4Block, vector = kVectorBytes;
  for (int64_t block = 0; block < bytes_of(width) / (2 * kInt4Block); ++block) {
    Words16 columns[4] = {};
    if (block * kInt4Block < width) __builtin_memcpy(columns, values + block * kInt4Block, sizeof columns);
    uint8_t* of_block = to + block / blocks * 4 * vector + block % blocks * (vector / blocks);
    for (int half = 0; half < 2; ++half) {
      const Words16 even = columns[half], odd = columns[half + 2];
      const Words16 high = even >> 8 | (odd & 0xff00), low = (even & 0xff) | odd << 8;
      __builtin_memcpy(of_block + 2 * half * vector, &high, sizeof high);
      __builtin_memcpy(of_block + (2 * half + 1) * vector, &low, sizeof low);
    }
  }
}
#else
constexpr int64_t bytes_of(int64_t) { return 0; }
inline void split_bytes(const int16_t*, int64_t, uint8_t*) {}
#endif

#if defined(__AVX2__)
// `first` in the first lane of 32 bits, zeros in all others.
DS_KERNELS_INLINE ShortVector starting_at(int32_t first) {
  Words lanes{};
  lanes[0] = static_cast<uint32_t>(first);
  return (ShortVector)lanes;
}

// As above, for one step.
template <int rows, int inputs>
DS_KERNELS_INLINE void add_products(ShortVector (&sums)[rows][inputs], const Dots& dots,
                                    const int8_t* const (&weights)[rows], int64_t at, const int16_t* input) {
  ShortVector values[inputs];
  DS_KERNELS_UNROLL
  for (int m = 0; m < inputs; ++m) __builtin_memcpy(&values[m], input + m * dots.columns, sizeof values[m]);
  DS_KERNELS_UNROLL
  for (int r = 0; r < rows; ++r) {
    const ShortVector wide = load_bytes(weights[r] + at);
    DS_KERNELS_UNROLL
    for (int m = 0; m < inputs; ++m) sums[r][m] = add_pairs(sums[r][m], wide, values[m]);
  }
}

// Scales of up to kLanes groups: a row's times an input's. Where a group ends one of them is loaded into all lanes.
template <int rows, int inputs>
struct GroupScales {
  float of[rows][inputs][kLanes];

  DS_KERNELS_INLINE GroupScales(const float* const (&scales)[rows], const float* of_inputs, int64_t groups, int64_t first) {
    const auto multiply = [&](auto memory) {
      for (int r = 0; r < rows; ++r) {
        for (int m = 0; m < inputs; ++m) {
          store_bits(of[r][m], memory.load(scales[r] + first) * memory.load(of_inputs + m * groups + first));
        }
      }
    };
    if (groups - first >= kLanes) {
      multiply(PlainVector{});
    } else {
      multiply(PartVector{groups - first});
    }
  }
};

// Adds the sums of each group, which `sum_group` gives, times its scales.
template <int rows, int inputs, class SumGroup>
DS_KERNELS_INLINE void add_groups(const Dots& dots, const float* const (&scales)[rows], const ShortInputs& input,
                                  float* const (&sums)[rows], int64_t sums_stride, SumGroup sum_group) {
  Floats total[rows][inputs] = {};
  for (int64_t first = 0; first < dots.groups; first += kLanes) {
    const GroupScales<rows, inputs> together(scales, input.scales, dots.groups, first);
    for (int64_t group = first; group < dots.groups && group < first + kLanes; ++group) {
      ShortVector part[rows][inputs];
      sum_group(group, part);
      DS_KERNELS_UNROLL
      for (int r = 0; r < rows; ++r) {
        DS_KERNELS_UNROLL
        for (int m = 0; m < inputs; ++m) total[r][m] += together.of[r][m][group - first] * floats_of(part[r][m]);
      }
    }
  }
  put_sums(total, sums, sums_stride);
}

// As above, for groups of whole steps.
template <int inputs, int rows>
DS_KERNELS_INLINE void dot_tile(const Dots& dots, const Rows<rows, int8_t>& from, const ShortInputs& input,
                                float* const (&sums)[rows], int64_t sums_stride) {
  constexpr int64_t line = 64;
  const int64_t width = dots.width;
  add_groups<rows, inputs>(dots, from.scales, input, sums, sums_stride, [&](int64_t group, auto& part) {
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) {
      DS_KERNELS_UNROLL
      for (int m = 0; m < inputs; ++m) part[r][m] = ShortVector{};
    }
    const int64_t end = (group + 1) * width;
    int64_t i = group * width;
    for (; i + line <= end; i += line) {
      DS_KERNELS_UNROLL
      for (int r = 0; r < rows; ++r) prefetch(from.weights[r] + i, dots.ahead);
      DS_KERNELS_UNROLL
      for (int64_t k = i; k < i + line; k += kShortStep) add_products(part, dots, from.weights, k, input.values + k);
    }
    for (; i < end; i += kShortStep) add_products(part, dots, from.weights, i, input.values + i);
  });
}

#if defined(__AVX512F__)
// As above, for int4 weights: as many products as 16 bits take, and a third of the instructions to unpack weights.
template <int inputs, int rows>
DS_KERNELS_INLINE void dot_tile(const Dots& dots, const Rows<rows, Int4Pair>& from, const ShortInputs& input,
                                float* const (&sums)[rows], int64_t sums_stride) {
  const int64_t width = dots.width, bytes = bytes_of(width);
  const ShortVector mask = _mm512_set1_epi8(15);
  add_groups<rows, inputs>(dots, from.scales, input, sums, sums_stride, [&](int64_t group, auto& part) {
    ShortVector high[rows][inputs] = {};
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) {
      DS_KERNELS_UNROLL
      for (int m = 0; m < inputs; ++m) part[r][m] = starting_at(input.eights[m * dots.groups + group]);
    }
    const auto add_step = [&](int64_t i, auto load_weights) {
      ShortVector levels[2][rows];
      DS_KERNELS_UNROLL
      for (int r = 0; r < rows; ++r) {
        const Int4Pair* weights = from.weights[r] + (group * width + i) / 2;
        prefetch(weights, dots.ahead);
        const ShortVector both = load_weights(weights);
        levels[0][r] = _mm512_and_si512(both, mask);
        levels[1][r] = _mm512_and_si512(_mm512_maskz_srli_epi16(~0u, both, 4), mask);
      }
      DS_KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        DS_KERNELS_UNROLL
        for (int m = 0; m < inputs; ++m) {
          const uint8_t* values = input.bytes + (m * dots.groups + group) * bytes + 2 * i + half * kFourStep;
          ShortVector with_sign, without;
          __builtin_memcpy(&with_sign, values, sizeof with_sign);
          __builtin_memcpy(&without, values + kFourStep / 2, sizeof without);
          DS_KERNELS_UNROLL
          for (int r = 0; r < rows; ++r) {
            high[r][m] = add_fours(high[r][m], levels[half][r], with_sign);
            part[r][m] = add_fours(part[r][m], without, levels[half][r]);
          }
        }
      }
    };
    int64_t i = 0;
    for (; i + kFourStep <= width; i += kFourStep) {
      add_step(i, [](const Int4Pair* weights) { return _mm512_loadu_si512(weights); });
    }
    if (i < width) {
      add_step(i, [](const Int4Pair* weights) { return _mm512_maskz_loadu_epi64(0x0f, weights); });
    }
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) {
      DS_KERNELS_UNROLL
      for (int m = 0; m < inputs; ++m) {
        part[r][m] = _mm512_add_epi32(part[r][m], _mm512_maskz_slli_epi32(0xffff, high[r][m], 8));
      }
    }
  });
}
#else
// Int4 weights with one input, by bytes: half the instructions to unpack weights.
template <int rows>
DS_KERNELS_INLINE void dot_one(const Dots& dots, const Rows<rows, Int4Pair>& from, const ShortInputs& input,
                               float* const (&sums)[rows]) {
  const ShortVector mask = _mm256_set1_epi8(15);
  const auto* bytes = reinterpret_cast<const ShortVector*>(input.bytes);
  const Int4Pair* weights[rows];
  DS_KERNELS_UNROLL
  for (int r = 0; r < rows; ++r) weights[r] = from.weights[r];
  // Adds the products of the next blocks: at most two, so that their sums fit into 16 bits. A lane gets two pairs of products
  // of 255 and 15, at most, from each.
  const auto add_blocks = [&](ShortVector (&part)[rows], auto blocks) {
    ShortVector high[rows], low[rows];
    DS_KERNELS_UNROLL
    for (int block = 0; block < decltype(blocks)::value; ++block) {
      DS_KERNELS_UNROLL
      for (int r = 0; r < rows; ++r) prefetch(weights[r], dots.ahead);
      DS_KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        const ShortVector with_sign = _mm256_loadu_si256(bytes++), without = _mm256_loadu_si256(bytes++);
        DS_KERNELS_UNROLL
        for (int r = 0; r < rows; ++r) {
          // Loaded for each half: there are no registers to keep it.
          const ShortVector both = _mm256_loadu_si256(reinterpret_cast<const ShortVector*>(weights[r]));
          const ShortVector levels = _mm256_and_si256(half == 0 ? both : _mm256_srli_epi16(both, 4), mask);
          if (block + half == 0) {
            high[r] = _mm256_maddubs_epi16(levels, with_sign);
            low[r] = _mm256_maddubs_epi16(without, levels);
          } else {
            high[r] = add_twos(high[r], levels, with_sign);
            low[r] = add_twos(low[r], without, levels);
          }
        }
      }
      DS_KERNELS_UNROLL
      for (int r = 0; r < rows; ++r) weights[r] += kInt4Block / 2;
    }
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) {
      part[r] = add_pairs(part[r], high[r], _mm256_set1_epi16(256));
      part[r] = add_pairs(part[r], low[r], _mm256_set1_epi16(1));
    }
  };
  Floats total[rows] = {};
  const auto add_all = [&](auto add_group) {
    for (int64_t group = 0; group < dots.groups; ++group) {
      ShortVector part[rows];
      DS_KERNELS_UNROLL
      for (int r = 0; r < rows; ++r) part[r] = starting_at(input.eights[group]);
      add_group(part);
      DS_KERNELS_UNROLL
      for (int r = 0; r < rows; ++r) total[r] += from.scales[r][group] * input.scales[group] * floats_of(part[r]);
    }
  };
  const auto one = std::integral_constant<int, 1>{};
  const auto two = std::integral_constant<int, 2>{};
  // Groups of 64 and 128 columns have no loop inside: it takes as long as the products.
  const int64_t blocks = dots.width / kInt4Block;
  if (blocks == 1) {
    add_all([&](auto& part) { add_blocks(part, one); });
  } else if (blocks == 2) {
    add_all([&](auto& part) { add_blocks(part, two); });
  } else {
    add_all([&](auto& part) {
      for (int64_t left = blocks; left >= 2; left -= 2) add_blocks(part, two);
      if (blocks % 2 == 1) add_blocks(part, one);
    });
  }
  DS_KERNELS_UNROLL
  for (int r = 0; r < rows; ++r) *sums[r] = sum_of(total[r]);
}

// As for int8 weights.
template <int inputs, int rows>
DS_KERNELS_INLINE void dot_tile(const Dots& dots, const Rows<rows, Int4Pair>& from, const ShortInputs& input,
                                float* const (&sums)[rows], int64_t sums_stride) {
  if constexpr (inputs == 1) return dot_one(dots, from, input, sums);
  const int64_t width = dots.width;
  add_groups<rows, inputs>(dots, from.scales, input, sums, sums_stride, [&](int64_t group, auto& part) {
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) {
      DS_KERNELS_UNROLL
      for (int m = 0; m < inputs; ++m) part[r][m] = starting_at(input.eights[m * dots.groups + group]);
    }
    for (int64_t i = group * width; i < (group + 1) * width; i += kInt4Block) {
      ShortVector pieces[rows][kPieces];
      DS_KERNELS_UNROLL
      for (int r = 0; r < rows; ++r) {
        prefetch(from.weights[r] + i / 2, dots.ahead);
        unpack(from.weights[r] + i / 2, pieces[r]);
      }
      DS_KERNELS_UNROLL
      for (int k = 0; k < kPieces; ++k) {
        DS_KERNELS_UNROLL
        for (int m = 0; m < inputs; ++m) {
          ShortVector values;
          __builtin_memcpy(&values, input.values + m * dots.columns + i + k * kShortStep, sizeof values);
          DS_KERNELS_UNROLL
          for (int r = 0; r < rows; ++r) part[r][m] = add_pairs(part[r][m], pieces[r][k], values);
        }
      }
    }
  });
}
#endif
#endif

// One group of one input in 16 bits, whole vectors of it; gives its scale, or NaN if an element is not finite.
inline float shorten(const float* from, int16_t* to, int64_t count) {
  typedef int16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));
  typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
  Words tops{};  // without their sign, numbers are in the order of their bits, infinity and NaN beyond all others
  for (int64_t i = 0; i < count; i += kLanes) {
    const Words size = bits_of(load(from + i)) & 0x7fffffffu;
    tops = select((Words)(size > tops), size, tops);
  }
  uint32_t top = 0;
  for (int lane = 0; lane < kLanes; ++lane) top = tops[lane] > top ? tops[lane] : top;
  if (top >= 0x7f800000u) return __builtin_nanf("");
  // The largest is below 2^exponent; 2^15 of these scales are more. Tiny groups keep a scale that is no subnormal.
  const int exponent = static_cast<int>(top >> 23) - 126;
  const int lowest = exponent - 15 < -120 ? -120 : exponent - 15;
  const float scale = float_of(static_cast<uint32_t>(lowest + 127) << 23);
  const float inverse = float_of(static_cast<uint32_t>(127 - lowest) << 23);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats steps = load(from + i) * inverse + kWhole - kWhole;  // to nearest even
    const Floats most = select((Words)(steps > 32767.f), Floats{} + 32767.f, steps);
    store_bits(to + i, __builtin_convertvector(__builtin_convertvector(most, Integers), Shorts));
  }
  return scale;
}

#endif  // not DS_KERNELS_GPU_COMPILER

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
