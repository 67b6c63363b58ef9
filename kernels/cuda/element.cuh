// Elements in memory and as floats; several of them at once in accesses of 16 bytes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include <ds_kernels/config.h>

namespace ds_kernels::cuda {

// ---- one element -----------------------------------------------------------------------------------------------

__device__ __forceinline__ float widen(float x) { return x; }

__device__ __forceinline__ float widen(BFloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

__device__ __forceinline__ float widen(Float16 x) {
#ifdef DS_KERNELS_CUDA_ON_HOST
  return on_host::widen_float16(x.bits);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#endif
}

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
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#endif
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

template <int bytes>
struct Word;
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<1> {
  using type = uint8_t;
};

template <class T, int count>
union Block {
  static constexpr int kBytes = sizeof(T) * count < 16 ? sizeof(T) * count : 16;
  using Access = typename Word<kBytes>::type;
  static constexpr int kAccesses = sizeof(T) * count / kBytes;
  Access words[kAccesses];
  T elements[count];
};

}  // namespace detail

// Reads `count` elements at an address that is a multiple of their size together, or of 16 bytes.
template <int count, class T>
__device__ __forceinline__ void load(const T* from, float (&to)[count]) {
  using Block = detail::Block<T, count>;
  Block block;
#pragma unroll
  for (int i = 0; i < Block::kAccesses; ++i) {
    block.words[i] = reinterpret_cast<const typename Block::Access*>(from)[i];
  }
#pragma unroll
  for (int i = 0; i < count; ++i) to[i] = widen(block.elements[i]);
}

// Writes `count` elements; addresses as for `load`.
template <int count, class T>
__device__ __forceinline__ void store(T* to, const float (&from)[count]) {
  using Block = detail::Block<T, count>;
  Block block;
#pragma unroll
  for (int i = 0; i < count; ++i) narrow(from[i], block.elements[i]);
#pragma unroll
  for (int i = 0; i < Block::kAccesses; ++i) {
    reinterpret_cast<typename Block::Access*>(to)[i] = block.words[i];
  }
}

__host__ __device__ __forceinline__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace ds_kernels::cuda
