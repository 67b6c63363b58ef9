// What a transformer layer computes between its matrix products, one element or one vector of elements at a time. No
// torch, no operating system. The activations themselves are in activation.h.
#pragma once

#include <ds_kernels/activation.h>

namespace ds_kernels {
inline namespace DS_KERNELS_CPU_LEVEL {

// x within [-bound, bound]; NaN stays.
template <class Real>
DS_KERNELS_INLINE Real bounded(Real x, float bound) {
  return maximum(Real{} - bound, minimum(Real{} + bound, x));
}

// The derivative of gelu by the tanh formula: with u = sqrt(2/pi) (x + 0.044715 x^3), e = e^-2u and s = 1 / (1 + e),
// which is (1 + tanh u) / 2, it is s + 2 x s (1 - s) u', where 1 - s is e s. From |x| = 10 on it rounds to 0 or 1.
template <class Real>
DS_KERNELS_INLINE Real gelu_tanh_slope(Real input) {
  const Real x = bounded(input, 10.f), square = x * x;
  const Real e = exponential(x * (-0x1.988454p0f - 0x1.2444f2p-4f * square)), s = 1.f / (1.f + e);
  return s + x * s * (e * s) * (0x1.988454p0f + 0x1.b6676cp-3f * square);
}

// The derivative of gelu by the error function: (1 + erf(x / sqrt 2)) / 2 + x e^(-x^2 / 2) / sqrt(2 pi).
template <class Real>
DS_KERNELS_INLINE Real gelu_slope(Real input) {
  const Real x = bounded(input, 16.f);
  return 0.5f + 0.5f * error_function(x * 0x1.6a09e6p-1f) + x * exponential(-0.5f * x * x) * 0x1.988454p-2f;
}

// The gradient of a normalised element's input: rstd (g - mean(g) - n mean(g n)), where g is the gradient of the result
// times weight, and n the normalised element before weight and bias (Ba et al. 2016).
template <class Real>
DS_KERNELS_INLINE Real layer_norm_slope(Real g, Real n, float mean_g, float mean_gn, float rstd) {
  return rstd * (g - mean_g - n * mean_gn);
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
