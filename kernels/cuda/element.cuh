// Elements in memory and as floats; several of them at once in accesses of 16 bytes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <ds_kernels/config.h>

namespace ds_kernels::cuda {

// ---- one element -----------------------------------------------------------------------------------------------

__device__ __forceinline__ float widen(float x) { return x; }

__device__ __forceinline__ float widen(BFloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

__device__ __forceinline__ float widen(Float16 x) {
#ifdef DS_KERNELS_CUDA_ON_HOST
  return on_host::widen_float16(x.bits);
#elif defined(__HIPCC__)
  return static_cast<float>(__builtin_bit_cast(_Float16, x.bits));
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#endif
}

__device__ __forceinline__ float widen(int8_t x) { return x; }

// Rounds to nearest even; a NaN stays a NaN.
__device__ __forceinline__ void narrow(float x, float& to) { to = x; }

__device__ __forceinline__ void narrow(float x, BFloat16& to) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
  const uint32_t bits = __float_as_uint(x);
  to.bits = static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

__device__ __forceinline__ void narrow(float x, Float16& to) {
#ifdef DS_KERNELS_CUDA_ON_HOST
  to.bits = on_host::narrow_float16(x);
#elif defined(__HIPCC__)
  to.bits = __builtin_bit_cast(uint16_t, static_cast<_Float16>(x));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#endif
}

// Of a whole number.
__device__ __forceinline__ void narrow(float x, int8_t& to) { to = static_cast<int8_t>(x); }

// Two elements as they lie in memory, `low` first.
template <class T>
__device__ __forceinline__ uint32_t narrow_two(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  T pair[2];
  narrow(low, pair[0]);
  narrow(high, pair[1]);
  return pair[0].bits | static_cast<uint32_t>(pair[1].bits) << 16;
#endif
}

template <class T>
__device__ __forceinline__ void widen_two(uint32_t pair, float& low, float& high) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
  } else {
#if defined(DS_KERNELS_CUDA_ON_HOST) || defined(__HIPCC__)
    low = widen(Float16{static_cast<uint16_t>(pair)});
    high = widen(Float16{static_cast<uint16_t>(pair >> 16)});
#else
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high)
        : "r"(pair));
#endif
  }
}

// ---- several elements ------------------------------------------------------------------------------------------

// Elements that a thread takes at once: 16 bytes of the narrowest type involved.
template <class T>
constexpr int kPack = 16 / sizeof(T);
template <class... Elements>
constexpr int kWidestPack = std::max({kPack<Elements>...});

// A number as a type: an argument of a generic lambda from which that can make an array.
template <int value>
struct Constant {
  __host__ __device__ constexpr operator int() const { return value; }
};

namespace detail {

__device__ __forceinline__ uint32_t bits_of(uint32_t word) { return word; }
__device__ __forceinline__ uint32_t bits_of(float word) { return __float_as_uint(word); }
__device__ __forceinline__ void set_bits(uint32_t& word, uint32_t bits) { word = bits; }
__device__ __forceinline__ void set_bits(float& word, uint32_t bits) { word = __uint_as_float(bits); }

}  // namespace detail

// Reads words of 4 bytes, up to four at once.
template <int count, class Word>
__device__ __forceinline__ void load_words(const Word* from, Word (&words)[count]) {
  using detail::set_bits;
  if constexpr (count % 4 == 0) {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i / 4];
      set_bits(words[i], four.x), set_bits(words[i + 1], four.y);
      set_bits(words[i + 2], four.z), set_bits(words[i + 3], four.w);
    }
  } else if constexpr (count == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    set_bits(words[0], two.x), set_bits(words[1], two.y);
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) words[i] = from[i];
  }
}

// Elements as they lie in memory: in registers they take half as many as floats do.
template <class T, int count>
struct Words {
  using Word = std::conditional_t<count * sizeof(T) % 4 == 0, uint32_t, T>;
  Word words[count * sizeof(T) / sizeof(Word)];

  // The address is a multiple of their size together, or of 16 bytes.
  __device__ __forceinline__ void load_from(const T* from) { load_words(reinterpret_cast<const Word*>(from), words); }

  __device__ __forceinline__ void widen_to(float (&to)[count]) const {
    if constexpr (std::is_same_v<Word, T>) {
      to[0] = widen(words[0]);
    } else if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < count / 2; ++i) widen_two<T>(words[i], to[2 * i], to[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) to[i] = __uint_as_float(words[i]);
    }
  }

  // Of several elements: the words that hold these values, rounded.
  __device__ __forceinline__ void narrow_from(const float (&from)[count]) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < count / 2; ++i) words[i] = narrow_two<T>(from[2 * i], from[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) words[i] = __float_as_uint(from[i]);
    }
  }
};

// Reads `count` elements; addresses as for Words.
template <int count, class T>
__device__ __forceinline__ void load(const T* from, float (&to)[count]) {
  if constexpr (sizeof(T) == 2 && count % 2 == 0) {
    Words<T, count> words;
    words.load_from(from);
    words.widen_to(to);
  } else if constexpr (sizeof(T) == 4) {
    load_words(from, to);
  } else if constexpr (std::is_same_v<T, int8_t> && count % 4 == 0) {
    // By way of the mantissa of 2^23: conversions would take longer than the memory.
    uint32_t words[count / 4];
    load_words(reinterpret_cast<const uint32_t*>(from), words);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const uint32_t bits = __byte_perm(words[i / 4] ^ 0x80808080u, 0x4b000000u, 0x7540u + i % 4);
      to[i] = __uint_as_float(bits) - (0x1p23f + 128.f);
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = widen(from[i]);
  }
}

// Writes words of 4 bytes, up to four at once: by __stwb, because nvcc splits a plain access into single words where it
// cannot follow the address.
template <int count, class Word>
__device__ __forceinline__ void store_words(Word* to, const Word (&words)[count]) {
  using detail::bits_of;
  if constexpr (count % 4 == 0) {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      __stwb(reinterpret_cast<uint4*>(to) + i / 4,
             uint4{bits_of(words[i]), bits_of(words[i + 1]), bits_of(words[i + 2]), bits_of(words[i + 3])});
    }
  } else if constexpr (count == 2) {
    __stwb(reinterpret_cast<uint2*>(to), uint2{bits_of(words[0]), bits_of(words[1])});
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = words[i];
  }
}

// Writes `count` elements; addresses as for `load`.
template <int count, class T>
__device__ __forceinline__ void store(T* to, const float (&from)[count]) {
  if constexpr (sizeof(T) == 2 && count % 2 == 0) {
    uint32_t pairs[count / 2];
#pragma unroll
    for (int i = 0; i < count / 2; ++i) pairs[i] = narrow_two<T>(from[2 * i], from[2 * i + 1]);
    store_words(reinterpret_cast<uint32_t*>(to), pairs);
  } else if constexpr (sizeof(T) == 4) {
    store_words(to, from);
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) narrow(from[i], to[i]);
  }
}

__host__ __device__ __forceinline__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace ds_kernels::cuda
