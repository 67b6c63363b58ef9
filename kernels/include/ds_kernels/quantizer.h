// Grouped integer quantization, one element (or one vector of elements) at a time. No torch, no operating system.
//
//   q = clamp(round((x - o) s), -2^(b-1), 2^(b-1) - 1)        x' = q / s + o
//
//   symmetric    s = 2^b / (2 max|x|),        o = 0
//   asymmetric   s = 2^b / (max x - min x),   o = (max x + min x) / 2
//
// with b bits, as DeepSpeed's CUDA source has it. Rounding is to nearest even. What is stored is 1 / s, and o.
#pragma once

#include <ds_kernels/vec_math.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "4-bit levels are moved in words whose first byte is lowest");

namespace ds_kernels {

// How the values of a group become levels.
struct Quantization {
  float scale, offset;
  float low, high;  // the levels
};

// ---- what is asked of a device -------------------------------------------------------------------------------------
//
// `groups` groups of `size` elements each, contiguous. `params` has 1 / s of each group, and o behind it unless symmetric.
// Levels of 4 bits lie two in a byte.

struct Levels {
  int bits;  // 8 or 4
  bool symmetric;
};

// Where a group goes: from node, device, slice to slice, device, node, in runs of groups that stay together.
struct Swizzle {
  int64_t pipeline = 1, nodes = 1, devices_per_node = 1, run = 0;  // 0: each group stays at its place
};

struct QuantizeGroups {
  const void* x;
  void* levels;
  float* params;
  int64_t groups, size;
  Levels as;
  Swizzle swizzle;
};

struct DequantizeGroups {
  const void* levels;
  const float* params;
  void* x;
  int64_t groups, size;
  Levels as;
};

// What several devices sent, each `groups * size` levels in groups of `received_size`, is added up and quantized again.
struct ReduceGroups {
  const void* received;
  const float* received_params;
  int64_t devices, received_size;
  void* levels;
  float* params;
  int64_t groups, size;
  Levels as;
};

// x = level / scale + minimum, with unsigned levels; scale and minimum are of x's dtype, one for each group.
struct DequantizeRangeGroups {
  const void* levels;
  const void* scale;
  const void* minimum;
  void* x;
  int64_t groups, size;
  int bits;
};

// x becomes, in place, what quantization would leave of it.
struct FakeQuantizeGroups {
  void* x;
  const float* noise;  // null for rounding to nearest
  int64_t groups, size;
  int bits;  // 2 to 16
  bool symmetric;
};

inline namespace DS_KERNELS_CPU_LEVEL {

struct Division {
  DS_KERNELS_INLINE int64_t operator()(int64_t a, int64_t b) const { return a / b; }
};

template <class Divide = Division>
DS_KERNELS_INLINE int64_t place_of(const Swizzle& s, int64_t group, const Divide& divide = {}) {
  if (s.run == 0) return group;
  const int64_t run = divide(group, s.run), rank = divide(run, s.pipeline), node = divide(rank, s.devices_per_node);
  const int64_t slice = run - rank * s.pipeline, device = rank - node * s.devices_per_node;
  return ((slice * s.devices_per_node + device) * s.nodes + node) * s.run + group - run * s.run;
}

// A span of 0 needs no scale; a NaN stays one.
DS_KERNELS_INLINE Quantization quantization(float span, float offset, int bits) {
  const float levels = static_cast<float>(1 << bits);
  return {span == 0 ? 1.f : levels / span, offset, -levels / 2, levels / 2 - 1};
}

// To a whole number, ties to even, for |x| < 2^22.
template <class Real>
DS_KERNELS_INLINE Real round_to_even(Real x) {
  return x + kWhole - kWhole;
}

// A NaN stays one.
template <class Real>
DS_KERNELS_INLINE Real clamp(Real x, float low, float high) {
  return maximum(Real{} + low, minimum(Real{} + high, x));
}

// The level of a value. What has none, NaN or an infinity times 0, gets 0: the group's scale tells of it.
template <class Real>
DS_KERNELS_INLINE Real quantized(Real x, const Quantization& q) {
  return zero_unless_finite(round_to_even(clamp((x - q.offset) * q.scale, q.low, q.high)));
}

// ---- 4-bit levels: the first of two in the upper half of their byte -----------------------------------------------

// Eight levels, from the nibbles of four bytes to bytes.
DS_KERNELS_INLINE uint64_t bytes_of_nibbles(uint32_t nibbles) {
  uint64_t x = nibbles;
  x = (x | x << 16) & 0x0000ffff0000ffffu;
  x = (x | x << 8) & 0x00ff00ff00ff00ffu;
  return (x >> 4 & 0x000f000f000f000fu) | (x & 0x000f000f000f000fu) << 8;
}

// And back; the upper halves of the bytes do not matter.
DS_KERNELS_INLINE uint32_t nibbles_of_bytes(uint64_t bytes) {
  uint64_t x = (bytes & 0x000f000f000f000fu) << 4 | (bytes >> 8 & 0x000f000f000f000fu);
  x = (x | x >> 8) & 0x0000ffff0000ffffu;
  return static_cast<uint32_t>(x | x >> 16);
}

// ---- the range of a group ------------------------------------------------------------------------------------------
//
// Floats are compared by whole numbers in the same order, in which a NaN lies beyond the infinities: it cannot get lost.

DS_KERNELS_INLINE int32_t order_of(float x) {
  const auto bits = static_cast<int32_t>(bits_of(x));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
DS_KERNELS_INLINE float from_order(int32_t order) {
  return float_of(static_cast<uint32_t>(order ^ ((order >> 31) & 0x7fffffff)));
}

// ---- vectors of levels in memory -----------------------------------------------------------------------------------

#ifndef DS_KERNELS_GPU_COMPILER

// The first lanes of an array.
DS_KERNELS_INLINE Words lanes_of(const uint32_t (&array)[16]) {
  Words words;
  __builtin_memcpy(&words, array, sizeof words);
  return words;
}

// The unsigned 4-bit levels of a vector, by shifting all of them down at once.
DS_KERNELS_INLINE Integers spread_nibbles(const uint32_t (&packed)[2]) {
  static constexpr uint32_t kShifts[16] = {4, 0, 12, 8, 20, 16, 28, 24, 4, 0, 12, 8, 20, 16, 28, 24};
  Words words = Words{} + packed[0];
  if constexpr (kLanes == 16) {
    static constexpr uint32_t kSecond[16] = {0, 0, 0, 0, 0, 0, 0, 0, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
    words = select(lanes_of(kSecond), Words{} + packed[1], words);
  }
  return (Integers)(words >> lanes_of(kShifts) & 15u);
}

template <class Memory>
DS_KERNELS_INLINE Integers load_nibbles(const void* levels, int64_t position, Memory memory) {
  uint32_t packed[2] = {};
  __builtin_memcpy(packed, static_cast<const uint8_t*>(levels) + position / 2, lanes_in(memory) / 2);
  return spread_nibbles(packed);
}

template <class Memory>
DS_KERNELS_INLINE Bytes load_bytes(const void* levels, int64_t position, Memory memory) {
  int8_t loaded[kLanes] = {};
  __builtin_memcpy(loaded, static_cast<const int8_t*>(levels) + position, lanes_in(memory));
  return load_bits<Bytes>(loaded);
}

// The levels from `position` on of an array of levels of `bits` bits; `position` is even.
template <int bits, class Memory>
DS_KERNELS_INLINE Floats load_signed(const void* levels, int64_t position, Memory memory) {
  if constexpr (bits == 8) {
    return widen_int8(load_bytes(levels, position, memory));
  } else {
    return __builtin_convertvector((load_nibbles(levels, position, memory) ^ 8) - 8, Floats);
  }
}
template <int bits, class Memory>
DS_KERNELS_INLINE Floats load_unsigned(const void* levels, int64_t position, Memory memory) {
  if constexpr (bits == 8) {
    return widen_int8(load_bytes(levels, position, memory) ^ -128) + 128.f;
  } else {
    return __builtin_convertvector(load_nibbles(levels, position, memory), Floats);
  }
}

template <int bits, class Memory>
DS_KERNELS_INLINE void store_levels(void* levels, int64_t position, Floats x, Memory memory) {
  constexpr int kBytes = kLanes * bits / 8;
  uint8_t unpacked[kLanes], packed[kBytes];
  store_bits(unpacked, __builtin_convertvector(__builtin_convertvector(x, Integers), Bytes));
  if constexpr (bits == 8) {
    __builtin_memcpy(packed, unpacked, kLanes);
  } else {
    for (int byte = 0; byte < kBytes; byte += 4) {
      constexpr int kWord = kBytes < 4 ? kBytes : 4;
      uint64_t bytes = 0;
      __builtin_memcpy(&bytes, unpacked + 2 * byte, 2 * kWord);
      const uint32_t nibbles = nibbles_of_bytes(bytes);
      __builtin_memcpy(packed + byte, &nibbles, kWord);
    }
  }
  __builtin_memcpy(static_cast<uint8_t*>(levels) + position * bits / 8, packed, lanes_in(memory) * bits / 8);
}

DS_KERNELS_INLINE Integers order_of(Floats x) {
  const Integers bits = (Integers)x;
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The lanes that there are; `other` in those beyond.
DS_KERNELS_INLINE Integers present(Integers x, Integers, WholeVector) { return x; }
DS_KERNELS_INLINE Integers present(Integers x, Integers other, PartVector part) {
  for (int64_t lane = part.count; lane < kLanes; ++lane) x[lane] = other[lane];
  return x;
}

// The smallest and largest of values that are handed over vector by vector; 0 and the largest magnitude if symmetric.
template <bool symmetric>
class Range {
 public:
  template <class Memory>
  DS_KERNELS_INLINE void include(Floats x, Memory memory) {
    const Integers order = symmetric ? (Integers)x & 0x7fffffff : order_of(x);
    const Integers above = present(order, high_, memory), below = present(order, low_, memory);
    high_ = above > high_ ? above : high_;
    if (!symmetric) low_ = below < low_ ? below : low_;
  }

  DS_KERNELS_INLINE float low() const {
    int32_t order = low_[0];
    for (int lane = 1; lane < kLanes; ++lane) order = low_[lane] < order ? low_[lane] : order;
    return symmetric ? 0 : from_order(order);
  }
  DS_KERNELS_INLINE float high() const {
    int32_t order = high_[0];
    for (int lane = 1; lane < kLanes; ++lane) order = high_[lane] > order ? high_[lane] : order;
    return from_order(order);
  }

 private:
  Integers low_ = Integers{} + INT32_MAX, high_ = Integers{} + (symmetric ? 0 : INT32_MIN);
};

#endif  // not DS_KERNELS_GPU_COMPILER

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
