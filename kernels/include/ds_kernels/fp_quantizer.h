// Grouped quantization to floating-point numbers of 4 to 12 bits, one element (or one vector of elements) at a time. No
// torch, no operating system.
//
//   v = x (L / a)       stored: round(v), and a / L        a: a group's largest magnitude, L: the format's largest number
//
// A number has a sign, E bits of exponent and M of mantissa: (1 + m / 2^M) 2^(e - b) with b = 2^(E-1) - 1, and 0 where e
// and m are 0. Rounding is to nearest, ties away from 0. That is DeepSpeed's fp_quantize_impl.cu, but for 0, which has no
// number there.
#pragma once

#include <ds_kernels/vec_math.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are moved in words whose first byte is lowest");

namespace ds_kernels {

struct FpFormat {
  int exponent, mantissa;  // E and M

  DS_KERNELS_INLINE int bits() const { return 1 + exponent + mantissa; }
  DS_KERNELS_INLINE int lost() const { return 23 - mantissa; }  // bits of a float's mantissa
  // A float's exponent and mantissa, cut to E and M bits, less this are a number without its sign.
  DS_KERNELS_INLINE uint32_t base() const { return (128u - (1u << (exponent - 1))) << mantissa; }
  DS_KERNELS_INLINE uint32_t least() const { return 1u << mantissa; }
  DS_KERNELS_INLINE uint32_t most() const { return (1u << (exponent + mantissa)) - 1; }
};

// Numbers of so many lie in whole bytes: as many as a number has bits.
constexpr int kNumbers = 8;
constexpr int kScaleBytes = 4;

// ---- what is asked of a device -------------------------------------------------------------------------------------
//
// `groups` groups of `size` elements each, contiguous; `size` is a multiple of kNumbers. `stored` has, for each group, its
// numbers from the lowest bit up and its scale, a / L, a float at any address.

struct FpQuantizeGroups {
  const void* x;
  const float* noise;  // null for rounding to nearest
  void* stored;
  int64_t groups, size;
  FpFormat format;
};

struct FpDequantizeGroups {
  const void* stored;
  void* x;
  int64_t groups, size;
  FpFormat format;
};

inline namespace DS_KERNELS_CPU_LEVEL {

DS_KERNELS_INLINE int64_t fp_row_bytes(int64_t size, const FpFormat& format) {
  return size * format.bits() / 8 + kScaleBytes;
}

// L.
DS_KERNELS_INLINE float fp_largest(const FpFormat& f) { return float_of((f.most() + f.base()) << f.lost()); }

// What values are multiplied by. Of zeros it does not matter.
DS_KERNELS_INLINE float fp_factor(float largest, const FpFormat& f) {
  return largest == 0 ? 1.f : fp_largest(f) / largest;
}

// What rounding adds to a float's bits, in units of the last: half of what is lost of it, or a part of that by chance.
DS_KERNELS_INLINE uint32_t fp_half(const FpFormat& f) { return 1u << (f.lost() - 1); }

// The number nearest to a value. What is none, NaN or an infinity times 0, gets 0: the group's scale tells of it. Word is
// uint32_t or Words, Real is float or Floats.
template <class Real, class Word>
DS_KERNELS_INLINE Word fp_number(Real v, Word added, const FpFormat& f) {
  const Word bits = bits_of(zero_unless_finite(v)), magnitude = bits & 0x7fffffffu;
  const Word least = Word{} + f.least(), most = Word{} + f.most(), base = Word{} + f.base();
  const Word rounded = (magnitude + added) >> f.lost();  // the carry goes into the exponent
  Word number = rounded < base + least ? least : rounded - base;
  number = number < most ? number : most;
  number = magnitude < Word{} + 0x00800000u ? Word{} : number;
  return number | (bits >> 31) << (f.exponent + f.mantissa);
}

// And back.
template <class Word>
DS_KERNELS_INLINE auto fp_value(Word number, const FpFormat& f) {
  const Word magnitude = number & f.most();
  const Word bits = magnitude == Word{} ? Word{} : (magnitude + f.base()) << f.lost();
  return float_of(bits | (number >> (f.exponent + f.mantissa)) << 31);
}

// ---- eight numbers in as many bytes as they have bits ---------------------------------------------------------------

DS_KERNELS_INLINE void fp_pack(const uint32_t (&numbers)[kNumbers], int bits, uint8_t* to) {
  uint64_t low = 0, high = 0;  // the bits below 64, and those from there on
  for (int j = 0; j < kNumbers; ++j) {
    const int at = j * bits;
    if (at < 64) low |= static_cast<uint64_t>(numbers[j]) << at;
    if (at + bits > 64) high |= at < 64 ? numbers[j] >> (64 - at) : static_cast<uint64_t>(numbers[j]) << (at - 64);
  }
  for (int byte = 0; byte < bits; ++byte) {
    to[byte] = static_cast<uint8_t>(byte < 8 ? low >> (8 * byte) : high >> (8 * (byte - 8)));
  }
}

DS_KERNELS_INLINE void fp_unpack(const uint8_t* from, int bits, uint32_t (&numbers)[kNumbers]) {
  uint64_t low = 0, high = 0;
  for (int byte = 0; byte < bits; ++byte) {
    if (byte < 8) {
      low |= static_cast<uint64_t>(from[byte]) << (8 * byte);
    } else {
      high |= static_cast<uint64_t>(from[byte]) << (8 * (byte - 8));
    }
  }
  for (int j = 0; j < kNumbers; ++j) {
    const int at = j * bits;
    uint64_t number = at < 64 ? low >> at : high >> (at - 64);
    if (at < 64 && at + bits > 64) number |= high << (64 - at);
    numbers[j] = static_cast<uint32_t>(number) & ((1u << bits) - 1);
  }
}

// ---- scales, at any address -----------------------------------------------------------------------------------------

DS_KERNELS_INLINE void fp_store_scale(float scale, uint8_t* to) {
  const uint32_t bits = bits_of(scale);
  for (int byte = 0; byte < kScaleBytes; ++byte) to[byte] = static_cast<uint8_t>(bits >> (8 * byte));
}

DS_KERNELS_INLINE float fp_load_scale(const uint8_t* from) {
  uint32_t bits = 0;
  for (int byte = 0; byte < kScaleBytes; ++byte) bits |= static_cast<uint32_t>(from[byte]) << (8 * byte);
  return float_of(bits);
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
