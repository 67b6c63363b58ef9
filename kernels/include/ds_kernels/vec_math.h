// exp and erf for floats and for vectors of floats, and reductions over the lanes of a vector.
//
// Each function is written once: `Real` is float or Floats. They call nothing from the standard library, so they vectorise
// and stay within their level's namespace; NVIDIA's GPUs take CUDA's own, which know the hardware's exponential. Worst
// errors over all floats, in units in the last place of the float nearest to the true result (all of them compared with
// double, with and without fused multiply-add):
//
//   exponential 1.1 (subnormal results included)      error_function 1.5
//
// NaN gives NaN; infinities and signed zeros give what C's functions give. Polynomials are minimax fits of our own.
#pragma once

#include <cstddef>
#include <utility>

#include <ds_kernels/vec.h>

namespace ds_kernels {
inline namespace DS_KERNELS_CPU_LEVEL {

// ---- what formulas of one element need beside vec.h, so that they read like those of vectors --------------------

DS_KERNELS_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

DS_KERNELS_INLINE float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

DS_KERNELS_INLINE float select(bool mask, float a, float b) { return mask ? a : b; }

#ifndef DS_KERNELS_GPU_COMPILER
typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));  // what comparing vectors gives: 0 or -1

DS_KERNELS_INLINE Floats select(Integers mask, Floats a, Floats b) { return select((Words)mask, a, b); }
#endif

// The larger, or smaller, one; b where either is NaN.
template <class Real>
DS_KERNELS_INLINE Real maximum(Real a, Real b) {
  return select(a > b, a, b);
}
template <class Real>
DS_KERNELS_INLINE Real minimum(Real a, Real b) {
  return select(a < b, a, b);
}
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(DS_KERNELS_GPU_COMPILER)
DS_KERNELS_INLINE Floats maximum(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
DS_KERNELS_INLINE Floats minimum(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
#endif

template <class Real>
DS_KERNELS_INLINE Real absolute(Real x) {
  return float_of(bits_of(x) & 0x7fffffffu);
}

// The magnitude of `x`, which is not negative, with the sign of `sign`.
template <class Real>
DS_KERNELS_INLINE Real with_sign_of(Real sign, Real x) {
  return float_of(bits_of(x) | (bits_of(sign) & 0x80000000u));
}

// Coefficients from the lowest power up.
template <class Real>
DS_KERNELS_INLINE Real polynomial(Real, float c) {
  return Real{} + c;
}
template <class Real, class... Coefficients>
DS_KERNELS_INLINE Real polynomial(Real x, float c, Coefficients... higher) {
  return polynomial(x, higher...) * x + c;
}

// ---- exp --------------------------------------------------------------------------------------------------------

// Adding it rounds to a whole number, which then lies in the low bits.
constexpr float kWhole = 0x1.8p23f;

// 2^n for whole n in [-126, 127].
template <class Real>
DS_KERNELS_INLINE Real power_of_two(Real n) {
  return float_of((bits_of(n + kWhole) << 23) + 0x3f800000u);
}

// x 2^n for whole n in [-252, 254]: rounded once, to subnormals too.
DS_KERNELS_INLINE float scale(float x, float n) {
  const float half = n * 0.5f + kWhole - kWhole;
  return x * power_of_two(half) * power_of_two(n - half);
}
#ifndef DS_KERNELS_GPU_COMPILER
DS_KERNELS_INLINE Floats scale(Floats x, Floats n) {
#ifdef __AVX512F__
  return (Floats)_mm512_maskz_scalef_ps(0xffff, (__m512)x, (__m512)n);
#else
  const Floats half = n * 0.5f + kWhole - kWhole;
  return x * power_of_two(half) * power_of_two(n - half);
#endif
}
#endif

// e^x = 2^n (1 + fraction) with |fraction| <= 0.42.
template <class Real>
struct Exponential {
  Real n, fraction;
};

// For |x| <= 128.
template <class Real>
DS_KERNELS_INLINE Exponential<Real> split_exponential(Real x) {
  const Real n = x * 0x1.715476p0f + kWhole - kWhole;
  // ln 2 in two parts; n times the first is exact.
  const Real r = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
  const Real curve =
      polynomial(r, 0x1.fffffep-2f, 0x1.5554bp-3f, 0x1.555674p-5f, 0x1.1227f6p-7f, 0x1.6bebf2p-10f);
  return {n, r + r * r * curve};
}

template <class Real>
DS_KERNELS_INLINE Real exponential(Real x) {
#if defined(__CUDA_ARCH__)
  return expf(x);
#else
  // Beyond these bounds all is zero or infinite. In this order, because a NaN must stay.
  const Real bounded = maximum(Real{} - 104.f, minimum(Real{} + 89.f, x));
  const Exponential<Real> e = split_exponential(bounded);
  return scale(1.f + e.fraction, e.n);
#endif
}

// ---- erf --------------------------------------------------------------------------------------------------------

// a + a P(a^2) near zero, 1 - e^Q(a) beyond.
template <class Real>
DS_KERNELS_INLINE Real error_function(Real x) {
#if defined(__CUDA_ARCH__)
  return erff(x);
#else
  const Real a = minimum(Real{} + 4.f, absolute(x));  // erf 4 rounds to 1
  const Real near = a + a * polynomial(a * a, 0x1.06eba6p-3f, -0x1.8126e8p-2f, 0x1.ce1abap-4f, -0x1.b68ff6p-6f,
                                       0x1.47575ep-8f, -0x1.3a8ab6p-11f);
  const Real exponent = polynomial(a, -0x1.9a5ae6p-13f, -0x1.20af5ap+0f, -0x1.463ccp-1f, -0x1.a9b432p-4f,
                                   0x1.6c2a8p-6f, -0x1.8ee182p-9f, 0x1.9ae922p-13f);
  const Exponential<Real> e = split_exponential(exponent);
  const Real power = power_of_two(e.n);
  return with_sign_of(x, select(a < 0.92f, near, 1.f - power - power * e.fraction));
#endif
}

// ---- over the lanes of a vector ---------------------------------------------------------------------------------

#ifndef DS_KERNELS_GPU_COMPILER

// Each lane of the first `width` lanes with the one so many lanes behind it, and so on until there is one: in the same
// order at every call. In registers: lanes that go through memory are waited for at each width.
template <int width, class Combine, size_t... lanes>
DS_KERNELS_INLINE Floats combine_lanes(Floats x, Combine combine, std::index_sequence<lanes...> all) {
#ifdef __clang__
  x = combine(x, __builtin_shufflevector(x, x, ((lanes + width) % kLanes)...));
#else
  x = combine(x, __builtin_shuffle(x, Words{(lanes + width) % kLanes...}));
#endif
  if constexpr (width > 1) return combine_lanes<width / 2>(x, combine, all);
  return x;
}

DS_KERNELS_INLINE float sum_of(Floats x) {
  const auto add = [](Floats a, Floats b) { return a + b; };
  return combine_lanes<kLanes / 2>(x, add, std::make_index_sequence<kLanes>{})[0];
}

// Whether a NaN in one lane wins is not said.
DS_KERNELS_INLINE float maximum_of(Floats x) {
  const auto larger = [](Floats a, Floats b) { return maximum(a, b); };
  return combine_lanes<kLanes / 2>(x, larger, std::make_index_sequence<kLanes>{})[0];
}

// In each block of `2 * half` lanes: `a`'s two halves added, and behind them `b`'s.
template <int half, size_t... lanes>
DS_KERNELS_INLINE Floats add_halves(Floats a, Floats b, std::index_sequence<lanes...>) {
#define DS_KERNELS_FROM (lanes / (2 * half) * (2 * half) + lanes % half + (lanes % (2 * half) < half ? 0 : kLanes))
#ifdef __clang__
  return __builtin_shufflevector(a, b, DS_KERNELS_FROM...) + __builtin_shufflevector(a, b, (DS_KERNELS_FROM + half)...);
#else
  const Words first{DS_KERNELS_FROM...};
  return __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, first + half);
#endif
#undef DS_KERNELS_FROM
}

template <int half>
DS_KERNELS_INLINE void fold(Floats (&vectors)[kLanes]) {
  DS_KERNELS_UNROLL
  for (int i = 0; i < half; ++i) {
    vectors[i] = add_halves<half>(vectors[i], vectors[i + half], std::make_index_sequence<kLanes>{});
  }
  if constexpr (half > 1) fold<half / 2>(vectors);
}

// Lane i of the result is the sum of all lanes of the i-th vector, with less work than as many times sum_of(). The
// vectors are not kept.
DS_KERNELS_INLINE Floats sums_of(Floats (&vectors)[kLanes]) {
  fold<kLanes / 2>(vectors);
  return vectors[0];
}

#endif  // not DS_KERNELS_GPU_COMPILER

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
