// Vectors of floats, as wide as the target has them, and their way to and from memory.
//
// Arithmetic is that of the GCC/clang vector extensions, which lower to any target: AVX-512, AVX2, NEON, VSX, RVV
// and, where there is nothing, to scalar code. Intrinsics appear only where the extensions have no word for an
// instruction, square root and half-precision conversion among them, or where GCC makes several of one.
//
// A vector behaves like a float in formulas (`a * b + 2.f * c`), and the functions that formulas need exist for both,
// so that one maths header serves vectors on a CPU and single elements on a GPU.
#pragma once

#include <type_traits>

#include <ds_kernels/config.h>

#ifdef DS_KERNELS_CUDA_ON_HOST
#include <cuda_runtime.h>
#endif
#ifdef DS_KERNELS_GPU_COMPILER
#include <cmath>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ds_kernels {
inline namespace DS_KERNELS_CPU_LEVEL {

// ---- one element -----------------------------------------------------------------------------------------------

// On NVIDIA's GPUs roots and quotients are two units in the last place off: rounding them exactly takes more instructions
// than memory leaves time for, in 16 bits. Tests on the host have such errors too.
#if defined(__CUDA_ARCH__)
DS_KERNELS_INLINE float square_root(float x) {
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}
#elif defined(DS_KERNELS_CUDA_ON_HOST)
DS_KERNELS_INLINE float square_root(float x) { return on_host::inexact(__builtin_sqrtf(x), 2); }
#elif defined(DS_KERNELS_GPU_COMPILER)
DS_KERNELS_INLINE float square_root(float x) { return ::sqrtf(x); }
#else
DS_KERNELS_INLINE float square_root(float x) { return __builtin_sqrtf(x); }  // no function that a linker could merge
#endif

// a / b; on NVIDIA's GPUs 0 for finite a and |b| above 2^126.
template <class Real>
DS_KERNELS_INLINE Real quotient(Real a, Real b) {
#if defined(__CUDA_ARCH__) || defined(DS_KERNELS_CUDA_ON_HOST)
  if constexpr (std::is_same_v<Real, float>) return __fdividef(a, b);
#endif
  return a / b;
}
DS_KERNELS_INLINE float zero_unless_finite(float x) { return x - x == 0 ? x : 0.f; }
DS_KERNELS_INLINE float zero_if_negative(float x) { return x < 0 ? 0.f : x; }
// -1, 1, or x itself where it is a zero or a NaN.
DS_KERNELS_INLINE float sign(float x) { return x > 0 ? 1.f : x < 0 ? -1.f : x; }

#ifndef DS_KERNELS_GPU_COMPILER

// ---- vectors ---------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;

// Before a loop over the vectors of a tile, so that they stay in registers.
#ifdef __clang__
#define DS_KERNELS_UNROLL _Pragma("unroll")
#else
#define DS_KERNELS_UNROLL _Pragma("GCC unroll 16")
#endif

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
typedef int8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));

// Conversions between vectors of one size keep the bits.
DS_KERNELS_INLINE Words bits_of(Floats x) { return (Words)x; }
DS_KERNELS_INLINE Floats float_of(Words x) { return (Floats)x; }

// Lanes of `a` where `mask` is all ones, of `b` where it is zero.
DS_KERNELS_INLINE Words select(Words mask, Words a, Words b) { return (mask & a) | (~mask & b); }
DS_KERNELS_INLINE Floats select(Words mask, Floats a, Floats b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Floats)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);  // of the line below GCC makes three instructions
#else
  return float_of(select(mask, bits_of(a), bits_of(b)));
#endif
}

template <class Vector, class Element>
DS_KERNELS_INLINE Vector load_bits(const Element* from) {
  static_assert(sizeof(Vector) == kLanes * sizeof(Element), "a vector of kLanes elements");
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector, class Element>
DS_KERNELS_INLINE void store_bits(Element* to, Vector vector) {
  static_assert(sizeof(Vector) == kLanes * sizeof(Element), "a vector of kLanes elements");
  __builtin_memcpy(to, &vector, sizeof vector);
}

// ---- the functions of one element, for vectors -----------------------------------------------------------------

DS_KERNELS_INLINE Floats square_root(Floats x) {
#if defined(__AVX512F__)
  // The unmasked forms read an undefined register in GCC's header, and GCC 12 warns of it at every use.
  return (Floats)_mm512_maskz_sqrt_ps(0xffff, (__m512)x);
#elif defined(__AVX__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return (Floats)_mm_sqrt_ps((__m128)x);
#elif defined(__aarch64__)
  return (Floats)vsqrtq_f32((float32x4_t)x);
#else
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
#endif
}

DS_KERNELS_INLINE Floats zero_unless_finite(Floats x) {
  return select((Words)((bits_of(x) & 0x7f800000u) != 0x7f800000u), x, Floats{});
}

DS_KERNELS_INLINE Floats zero_if_negative(Floats x) { return select((Words)(x < 0.f), Floats{}, x); }

DS_KERNELS_INLINE Floats sign(Floats x) {
  const Words one = (bits_of(x) & 0x80000000u) | 0x3f800000u;
  return select((Words)(x > 0.f) | (Words)(x < 0.f), float_of(one), x);
}

// ---- bfloat16: the upper half of a float -----------------------------------------------------------------------
//
// AVX512-BF16 has an instruction for the way down, but it flushes subnormals, and these loops wait for memory anyway.

DS_KERNELS_INLINE Floats widen_bfloat16(Halves halves) {
  // GCC 12 takes two halves of the vector one by one unless told so by name.
#if defined(__AVX512F__)
  return float_of((Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)halves) << 16);
#elif defined(__AVX2__)
  return float_of((Words)_mm256_cvtepu16_epi32((__m128i)halves) << 16);
#else
  return float_of(__builtin_convertvector(halves, Words) << 16);
#endif
}

// Rounds to nearest even; a NaN stays a NaN (made quiet).
DS_KERNELS_INLINE Halves narrow_bfloat16(Floats x) {
  const Words bits = bits_of(x);
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Ten instructions, where GCC makes fourteen of what is below.
  const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u), quiet_nan = bits | 0x400000u;
  const __m256 is_nan = _mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q);
  const __m256i upper = (__m256i)((Words)_mm256_blendv_ps((__m256)rounded, (__m256)quiet_nan, is_nan) >> 16);
  return (Halves)_mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
#else
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet_nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(select((Words)(x != x), quiet_nan, rounded), Halves);
#endif
}

// ---- int8 ------------------------------------------------------------------------------------------------------

DS_KERNELS_INLINE Floats widen_int8(Bytes bytes) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)bytes));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_set_epi64x(0, (int64_t)bytes)));
#else
  // By way of 16 bits: GCC 12 takes the direct way element by element.
  typedef int16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));
  typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, Shorts), Integers), Floats);
#endif
}

// ---- IEEE half precision ---------------------------------------------------------------------------------------

DS_KERNELS_INLINE Floats widen_float16(Halves halves) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)halves);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16((float16x4_t)halves);
#else
  const Words wide = __builtin_convertvector(halves, Words);
  const Words magnitude = wide & 0x7fffu;
  // Exponent and mantissa moved into place are 2^112 too small, for subnormals too.
  const Words finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
  const Words not_finite = (magnitude << 13) | 0x7f800000u;
  return float_of(((wide & 0x8000u) << 16) | select((Words)(magnitude >= 0x7c00u), not_finite, finite));
#endif
}

// Rounds to nearest even; overflows to infinity; a NaN stays a NaN (made quiet).
DS_KERNELS_INLINE Halves narrow_float16(Floats x) {
#if defined(__AVX512F__)
  return (Halves)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (Halves)vcvt_f16_f32((float32x4_t)x);
#else
  const Words bits = bits_of(x);
  const Words magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves the subnormal half, rounded by the addition itself, in the low bits.
  const Words subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const Words quiet_nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
  Words half = select((Words)(magnitude < 0x38800000u), subnormal, normal);
  half = select((Words)(magnitude >= 0x477ff000u), Words{} + 0x7c00u, half);
  half = select((Words)(magnitude > 0x7f800000u), quiet_nan, half);
  return __builtin_convertvector(half | ((bits >> 16) & 0x8000u), Halves);
#endif
}

// ---- memory ----------------------------------------------------------------------------------------------------

DS_KERNELS_INLINE Floats load(const float* from) { return load_bits<Floats>(from); }
DS_KERNELS_INLINE Floats load(const BFloat16* from) { return widen_bfloat16(load_bits<Halves>(from)); }
DS_KERNELS_INLINE Floats load(const Float16* from) { return widen_float16(load_bits<Halves>(from)); }
DS_KERNELS_INLINE Floats load(const int8_t* from) { return widen_int8(load_bits<Bytes>(from)); }

DS_KERNELS_INLINE void store(float* to, Floats x) { store_bits(to, x); }
DS_KERNELS_INLINE void store(BFloat16* to, Floats x) { store_bits(to, narrow_bfloat16(x)); }
DS_KERNELS_INLINE void store(Float16* to, Floats x) { store_bits(to, narrow_float16(x)); }

// ---- loops -----------------------------------------------------------------------------------------------------

// `x`, of which compilers do not know how it was made: a product in it and a sum that follows stay two instructions.
DS_KERNELS_INLINE Floats uncontracted(Floats x) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(x));
#elif defined(__x86_64__)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+m"(x));
#endif
  return x;
}

// Whether this CPU is one of AMD's.
inline bool is_amd() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// Whether it is one of AMD's of family 1Ah or above. By its number: compilers know Zen 5 by name since GCC 14.
inline bool is_zen5_or_later() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!is_amd() || !__get_cpuid(1, &a, &b, &c, &d)) return false;
  return (a >> 8 & 0xf) + (a >> 20 & 0xff) >= 0x1a;
#else
  return false;
#endif
}

// Whether it has AVX512-BF16. By its number: GCC 9 does not know it by name.
inline bool has_avx512_bf16() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx512f") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
#else
  return false;
#endif
}

// How far ahead of a load its array is fetched, in bytes. Intel's prefetchers stop at every page of every array that a loop
// streams through; going on past the page made Adam's step on four large arrays 13 % faster (best at 1.5 to 2 KiB). From a
// large cache so much is best on AMD's Zen 4, too.
constexpr int kPrefetchBytes = 2048;

// The same for arrays that lie in memory, not in caches: the prefetchers of AMD's CPUs follow them by themselves, and what
// is fetched far ahead takes their places. On Zen 4 Adam takes 0.85 times as long with 256 bytes as with 2 KiB.
inline uintptr_t stream_prefetch_bytes() { return is_amd() ? 256 : kPrefetchBytes; }

// Fetches what lies so many bytes behind an element: an address, not a pointer. It may be beyond the array, where fetching does
// no harm but arithmetic would.
template <class Element>
DS_KERNELS_INLINE void prefetch(const Element* from, uintptr_t ahead) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + ahead));
}

// How a loop body reaches memory at one position: a whole vector, or the first elements of one at the end of an array.
// Both run the same formula on the same lanes. So that a result does not depend on where a thread's share ends, compilers must
// also make the same instructions of it: where there is a branch between a product and a sum, they may contract the two for
// one and not for the other, see uncontracted().
struct WholeVector {
  template <class Element>
  DS_KERNELS_INLINE Floats load(const Element* from) const {
    prefetch(from, kPrefetchBytes);
    return DS_KERNELS_CPU_LEVEL::load(from);
  }
  template <class Element>
  DS_KERNELS_INLINE void store(Element* to, Floats x) const {
    DS_KERNELS_CPU_LEVEL::store(to, x);
  }
};

// A whole vector of an array that comes from memory.
struct StreamedVector : WholeVector {
  uintptr_t ahead = stream_prefetch_bytes();

  template <class Element>
  DS_KERNELS_INLINE Floats load(const Element* from) const {
    prefetch(from, ahead);
    return DS_KERNELS_CPU_LEVEL::load(from);
  }
};

// A whole vector that is in the cache, or that its loop fetches by itself.
struct PlainVector {
  template <class Element>
  DS_KERNELS_INLINE Floats load(const Element* from) const {
    return DS_KERNELS_CPU_LEVEL::load(from);
  }
  template <class Element>
  DS_KERNELS_INLINE void store(Element* to, Floats x) const {
    DS_KERNELS_CPU_LEVEL::store(to, x);
  }
};

struct PartVector {
  int64_t count;  // 0 < count < kLanes; lanes beyond are computed on zeros and dropped

  template <class Element>
  DS_KERNELS_INLINE Floats load(const Element* from) const {
    Element padded[kLanes];
    copy(from, padded);
    return DS_KERNELS_CPU_LEVEL::load(padded);
  }
  template <class Element>
  DS_KERNELS_INLINE void store(Element* to, Floats x) const {
    Element padded[kLanes];
    DS_KERNELS_CPU_LEVEL::store(padded, x);
    copy_back(padded, to);
  }

 private:
#if defined(__AVX512F__)
  // Masks take registers to memory and back at once; a copy of so many bytes is a call, and then the vector waits for it.
  template <class Element>
  DS_KERNELS_INLINE void copy(const Element* from, Element (&padded)[kLanes]) const {
    const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
    if constexpr (sizeof(Element) == 4) {
      const __m512i all = _mm512_maskz_loadu_epi32(mask, from);
      __builtin_memcpy(padded, &all, sizeof padded);
    } else if constexpr (sizeof(Element) == 2) {
      const __m256i all = _mm256_maskz_loadu_epi16(mask, from);
      __builtin_memcpy(padded, &all, sizeof padded);
    } else {
      static_assert(sizeof(Element) == 1);
      const __m128i all = _mm_maskz_loadu_epi8(mask, from);
      __builtin_memcpy(padded, &all, sizeof padded);
    }
  }
  template <class Element>
  DS_KERNELS_INLINE void copy_back(const Element (&padded)[kLanes], Element* to) const {
    const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
    if constexpr (sizeof(Element) == 4) {
      __m512i all;
      __builtin_memcpy(&all, padded, sizeof padded);
      _mm512_mask_storeu_epi32(to, mask, all);
    } else if constexpr (sizeof(Element) == 2) {
      __m256i all;
      __builtin_memcpy(&all, padded, sizeof padded);
      _mm256_mask_storeu_epi16(to, mask, all);
    } else {
      static_assert(sizeof(Element) == 1);
      __m128i all;
      __builtin_memcpy(&all, padded, sizeof padded);
      _mm_mask_storeu_epi8(to, mask, all);
    }
  }
#else
  template <class Element>
  DS_KERNELS_INLINE void copy(const Element* from, Element (&padded)[kLanes]) const {
#if defined(__AVX2__)
    if constexpr (sizeof(Element) == 4) {  // there are no masks for less, and stores by masks take long on AMD's CPUs
      const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
      const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
      const __m256i all = _mm256_maskload_epi32(reinterpret_cast<const int*>(from), mask);
      __builtin_memcpy(padded, &all, sizeof padded);
      return;
    }
#endif
    __builtin_memset(padded, 0, sizeof padded);
    __builtin_memcpy(padded, from, count * sizeof(Element));
  }
  template <class Element>
  DS_KERNELS_INLINE void copy_back(const Element (&padded)[kLanes], Element* to) const {
    __builtin_memcpy(to, padded, count * sizeof(Element));
  }
#endif
};

// How many elements of a vector there are.
DS_KERNELS_INLINE int64_t lanes_in(WholeVector) { return kLanes; }
DS_KERNELS_INLINE int64_t lanes_in(PartVector part) { return part.count; }

// Calls `body(position, memory)` for the vectors that cover `count` elements.
template <class Whole = WholeVector, class Body>
DS_KERNELS_INLINE void for_each_vector(int64_t count, Body body) {
  const Whole whole{};
  int64_t position = 0;
  for (; position + kLanes <= count; position += kLanes) body(position, whole);
  if (position < count) body(position, PartVector{count - position});
}

#endif  // not DS_KERNELS_GPU_COMPILER

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
