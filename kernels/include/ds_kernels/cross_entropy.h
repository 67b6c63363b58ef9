// Cross entropy of rows of logits, with its gradient in their place: what the op of this family asks of a device. No
// torch. With the row x, its target t, y = x or softcap tanh(x / softcap), l = log(sum of e^y) and n columns,
//
//   loss        l - (1 - smoothing) y_t - smoothing mean(y) + z_loss l^2
//   gradient_i  (e^(y_i - l) (1 + 2 z_loss l) - smoothing / n - (1 - smoothing if i is t)) y'_i
#pragma once

#include <cstdint>

#include <ds_kernels/vec_math.h>

namespace ds_kernels {

// Whether targets are columns or ignored. `wrong` is in host memory and becomes the first that is neither: a device
// that had to be waited for leaves it, and its kernel fails on such a target as torch's own does.
struct TargetCheck {
  const int64_t* target;
  int64_t rows, columns, ignore_index;
  const int64_t** wrong;
};

struct CrossEntropyRows {
  void* logits;           // [rows, columns], contiguous; the gradient afterwards, if that is wanted
  const int64_t* target;  // [rows]: columns, or ignore_index: loss and gradient are 0 then
  float* loss;            // [rows]
  int64_t rows, columns, ignore_index;
  float label_smoothing, z_loss;
  float softcap;  // 0: none
  bool gradient;
};

inline namespace DS_KERNELS_CPU_LEVEL {

// tanh: (e^2x - 1) / (e^2x + 1), of which nothing is lost near zero.
template <class Real>
DS_KERNELS_INLINE Real bounded_by_one(Real x) {
#if defined(__CUDA_ARCH__)
  return tanhf(x);
#else
  const Real a = minimum(Real{} + 10.f, absolute(x));  // tanh 10 rounds to 1
  const Exponential<Real> e = split_exponential(a + a);
  const Real power = power_of_two(e.n), above = power - 1.f + power * e.fraction;
  return with_sign_of(x, above / (above + 2.f));
#endif
}

// Its derivative, 4 e^2x / (e^2x + 1)^2: 1 - tanh^2 would lose all digits where tanh is near 1.
template <class Real>
DS_KERNELS_INLINE Real bounded_slope(Real x) {
  const Real e = exponential(-2.f * absolute(x)), share = 1.f / (1.f + e);
  return 4.f * e * share * share;
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
