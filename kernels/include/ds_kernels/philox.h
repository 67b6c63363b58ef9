// Dropout by a counter-based random number generator, Philox4x32-10 (Salmon et al. 2011): who has the seed can make a
// mask again, on any device, so none is stored.
//
// The seed is the key. Of a tensor seen as rows of columns, the counter (16 (column / 64) + column % 16, row, row >> 32,
// 0) gives four words, of which word column / 16 % 4 belongs to the element; it is dropped if the word is less than
// 2^32 p. So 16 neighbouring counters serve 64 neighbouring columns, in vectors of any width.
#pragma once

#include <ds_kernels/vec.h>

namespace ds_kernels {

// What an op asks of a device: which elements are dropped, and what the rest is multiplied by, 1 / (1 - p). Where the
// device reads the seed, a graph that is replayed takes the one that is there then.
struct SeededDropout {
  const int64_t* seed;  // on the device; null where nothing is dropped
  uint32_t threshold;
  float factor;
};

// For 0 <= p < 1.
inline SeededDropout dropout_of(const int64_t* seed, double p) {
  const double threshold = p * 4294967296.0 + 0.5;
  return {seed, threshold < 4294967295.0 ? static_cast<uint32_t>(threshold) : 0xffffffffu,
          static_cast<float>(1 / (1 - p))};
}

// The same with the seed at hand.
struct Dropout {
  uint32_t key[2];
  uint32_t threshold;
  float factor;
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultipliers[2] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t kPhiloxWeyl[2] = {0x9E3779B9u, 0xBB67AE85u};

inline namespace DS_KERNELS_CPU_LEVEL {

DS_KERNELS_INLINE Dropout with_key(const SeededDropout& dropout) {
  const auto seed = static_cast<uint64_t>(*dropout.seed);
  return {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}, dropout.threshold, dropout.factor};
}

// The four words of one counter, in its place.
DS_KERNELS_INLINE void philox(uint32_t (&words)[4], uint32_t key0, uint32_t key1) {
  constexpr uint32_t weyl0 = kPhiloxWeyl[0], weyl1 = kPhiloxWeyl[1];  // GPUs have no array of them
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t first = uint64_t{words[0]} * kPhiloxMultipliers[0];
    const uint64_t second = uint64_t{words[2]} * kPhiloxMultipliers[1];
    words[0] = static_cast<uint32_t>(second >> 32) ^ words[1] ^ key0;
    words[1] = static_cast<uint32_t>(second);
    words[2] = static_cast<uint32_t>(first >> 32) ^ words[3] ^ key1;
    words[3] = static_cast<uint32_t>(first);
    key0 += weyl0;
    key1 += weyl1;
  }
}

// The word of one element.
DS_KERNELS_INLINE uint32_t dropout_word(const Dropout& dropout, int64_t row, int64_t column) {
  uint32_t words[4] = {static_cast<uint32_t>(16 * (column / 64) + column % 16), static_cast<uint32_t>(row),
                       static_cast<uint32_t>(row >> 32), 0};
  philox(words, dropout.key[0], dropout.key[1]);
  return words[column / 16 % 4];
}

// x, multiplied or dropped.
DS_KERNELS_INLINE float keep(float x, uint32_t word, const Dropout& dropout) {
  return word >= dropout.threshold ? x * dropout.factor : 0.f;
}

#ifndef DS_KERNELS_GPU_COMPILER

DS_KERNELS_INLINE Floats keep(Floats x, Words words, const Dropout& dropout) {
  return select((Words)(words >= dropout.threshold), x * dropout.factor, Floats{});
}

typedef uint64_t Wides __attribute__((vector_size(kVectorBytes)));

// The products of the lanes' low halves; high halves do not count.
DS_KERNELS_INLINE Wides multiply_low_halves(Wides a, uint32_t b) {
  const Wides factor = Wides{} + b;
#if defined(__AVX512F__)
  return (Wides)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)factor);
#elif defined(__AVX2__)
  return (Wides)_mm256_mul_epu32((__m256i)a, (__m256i)factor);
#elif defined(__SSE2__)
  return (Wides)_mm_mul_epu32((__m128i)a, (__m128i)factor);
#elif defined(__aarch64__)
  return (Wides)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)factor));
#else
  return (a & 0xffffffffu) * factor;
#endif
}

// One counter in each lane, of which the low half counts.
struct WideCounters {
  Wides word[4];
};

DS_KERNELS_INLINE void philox_round(WideCounters& c, uint32_t key0, uint32_t key1) {
  const Wides first = multiply_low_halves(c.word[0], kPhiloxMultipliers[0]);
  const Wides second = multiply_low_halves(c.word[2], kPhiloxMultipliers[1]);
  c.word[0] = (second >> 32) ^ c.word[1] ^ key0;
  c.word[1] = second;
  c.word[2] = (first >> 32) ^ c.word[3] ^ key1;
  c.word[3] = first;
}

// The words of 64 neighbouring columns, in their order.
constexpr int kBlockColumns = 64;
struct BlockWords {
  Words vector[kBlockColumns / kLanes];
};

// Neighbouring counters lie in two vectors by turns, so that their words come out in order.
DS_KERNELS_INLINE BlockWords dropout_words(const Dropout& dropout, int64_t row, int64_t block) {
  BlockWords result;
  Wides even;
  for (int lane = 0; lane < kLanes / 2; ++lane) even[lane] = 2 * lane;
  for (int part = 0; part < 16 / kLanes; ++part) {
    const Wides first = even + static_cast<uint64_t>(16 * block + part * kLanes);
    const Wides low = Wides{} + static_cast<uint32_t>(row), high = Wides{} + static_cast<uint32_t>(row >> 32);
    WideCounters a{{first, low, high, Wides{}}}, b{{first + 1, low, high, Wides{}}};
    uint32_t key0 = dropout.key[0], key1 = dropout.key[1];
    for (int round = 0; round < kPhiloxRounds; ++round) {
      philox_round(a, key0, key1);
      philox_round(b, key0, key1);
      key0 += kPhiloxWeyl[0];
      key1 += kPhiloxWeyl[1];
    }
    for (int word = 0; word < 4; ++word) {
      result.vector[word * 16 / kLanes + part] = (Words)((a.word[word] & 0xffffffffu) | (b.word[word] << 32));
    }
  }
  return result;
}

// How a loop body drops elements of one vector, or none.
struct KeepSome {
  Words words;
  Dropout dropout;
  DS_KERNELS_INLINE Floats operator()(Floats x) const { return keep(x, words, dropout); }
};
struct KeepAll {
  DS_KERNELS_INLINE Floats operator()(Floats x) const { return x; }
};

// Calls `body(column, memory, kept)` for the vectors that cover a row; `kept(x)` is x after dropout.
template <bool dropping, class Body>
DS_KERNELS_INLINE void for_each_kept_vector(int64_t columns, const SeededDropout& dropout, int64_t row, Body body) {
  if constexpr (!dropping) {
    for_each_vector(columns, [&](int64_t column, auto memory) { body(column, memory, KeepAll{}); });
  } else {
    const Dropout d = with_key(dropout);
    for (int64_t block = 0; block * kBlockColumns < columns; ++block) {
      const BlockWords words = dropout_words(d, row, block);
      const int64_t first = block * kBlockColumns, count = columns - first;
      if (count >= kBlockColumns) {
        for (int i = 0; i < kBlockColumns / kLanes; ++i) {
          body(first + i * kLanes, WholeVector{}, KeepSome{words.vector[i], d});
        }
        continue;
      }
      for_each_vector(count, [&](int64_t position, auto memory) {
        body(first + position, memory, KeepSome{words.vector[position / kLanes], d});
      });
    }
  }
}

#endif  // not DS_KERNELS_GPU_COMPILER

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
