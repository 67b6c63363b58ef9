// What a transformer layer computes between its matrix products: what the ops of this family ask of a device, and their
// formulas for one element or one vector of elements. No torch, no operating system. The activations themselves are in
// activation.h.
#pragma once

#include <ds_kernels/activation.h>
#include <ds_kernels/philox.h>

namespace ds_kernels {

// ---- what is asked of a device -----------------------------------------------------------------------------------
//
// All arrays are contiguous rows of `columns` elements of one dtype, unless said otherwise. Sums are those of columns:
// one row, or null where they are not wanted.

// sum = residual + dropout(input + bias)
struct SumRows {
  const void* input;
  const void* bias;      // one row, or null
  const void* residual;  // or null
  void* sum;
  int64_t rows, columns;
  SeededDropout dropout;
};

struct DropoutGradRows {
  const void* grad_output;
  void* grad_input;
  void* sums;  // of grad_input
  int64_t rows, columns;
  SeededDropout dropout;
};

// The norm of a sum, or of its input if there is none to be written. An RMS norm takes 0 for the mean, and stores none.
struct TrainingNormRows {
  SumRows sum;         // whose `sum` may be null
  const void* weight;  // one row
  const void* bias;    // one row; null for RMS norm
  void* output;
  float* mean;  // one a row; null for RMS norm
  float* rstd;  // one a row: 1 / sqrt(variance + eps)
  float eps;
  bool rms = false;
};

struct NormGradRows {
  const void* grad_output;
  const void* grad_sum;  // or null
  const void* rows_in;   // the sum; or a layer norm's output if `mean` is null
  const float* mean;     // or null; not used by RMS norm
  const float* rstd;
  const void* weight;  // one row
  const void* bias;    // one row; there if a layer norm's `mean` is null
  void* grad_total;    // the gradient of the sum
  void* grad_input;    // that after dropout; null if nothing is dropped
  void* weight_sums;   // the gradient of weight
  void* bias_sums;     // the gradient of bias
  void* input_sums;    // of grad_input, or of grad_total if nothing is dropped
  int64_t rows, columns;
  SeededDropout dropout;
  bool rms = false;
};

struct GeluRows {
  const void* input;
  const void* bias;  // one row, or null
  void* output;
  int64_t rows, columns;
  bool tanh;
};

struct GeluGradRows {
  const void* grad_output;
  const void* input;
  const void* bias;  // one row, or null
  void* grad_input;
  void* sums;  // of grad_input
  int64_t rows, columns;
  bool tanh;
};

// output = activation(gate) up
struct GateRows {
  const void* gate;
  const void* up;
  void* output;
  int64_t rows, columns;
  Activation activation;
};

struct GateGradRows {
  const void* grad_output;
  const void* gate;
  const void* up;
  void* grad_gate;
  void* grad_up;
  int64_t rows, columns;
  Activation activation;
};

// How the dimensions before the last are laid out: row r of the scores adds the mask's row at the offset of r.
constexpr int kLeadingDimensions = 4;
struct MaskedSoftmaxRows {
  const void* scores;
  const void* mask;  // or null
  int64_t sizes[kLeadingDimensions];
  int64_t mask_strides[kLeadingDimensions];
  bool mask_is_one;  // each of the mask's rows is one element, for all columns
  void* output;      // after dropout
  void* probs;       // before dropout; null if nothing is dropped
  int64_t rows, columns;
  float scale;
  SeededDropout dropout;
};

struct SoftmaxGradRows {
  const void* grad_output;
  const void* probs;
  void* grad_scores;
  int64_t rows, columns;
  float scale;
  SeededDropout dropout;
};

// ---- formulas ----------------------------------------------------------------------------------------------------

inline namespace DS_KERNELS_CPU_LEVEL {

// x within [-bound, bound]; NaN stays.
template <class Real>
DS_KERNELS_INLINE Real bounded(Real x, float bound) {
  return maximum(Real{} - bound, minimum(Real{} + bound, x));
}

// An activation and its derivative, which share most of their work.
template <class Real>
struct Slope {
  Real value, slope;
};

// gelu by the tanh formula: with u = sqrt(2/pi) (x + 0.044715 x^3), e = e^-2u and s = 1 / (1 + e), which is
// (1 + tanh u) / 2, the derivative is s + 2 x s (1 - s) u', where 1 - s is e s. Beyond -10, where e overflows, it is 0,
// and no number near it: a gradient that it is multiplied by may be large. The value at minus infinity is NaN, as the
// forward op has it.
template <class Real>
DS_KERNELS_INLINE Slope<Real> gelu_tanh_slope(Real input) {
  const Real x = bounded(input, 10.f), square = x * x;
  const Real e = exponential(x * (-0x1.988454p0f - 0x1.2444f2p-4f * square)), s = quotient(Real{} + 1.f, 1.f + e);
  const Real slope = s + x * s * (e * s) * (0x1.988454p0f + 0x1.b6676cp-3f * square);
  return {select(input < -10.f, input * 0.f, input * s), select(input < -10.f, Real{}, slope)};
}

// gelu by the error function: the derivative is (1 + erf(x / sqrt 2)) / 2 + x e^(-x^2 / 2) / sqrt(2 pi).
template <class Real>
DS_KERNELS_INLINE Slope<Real> gelu_slope(Real input) {
  const Real x = bounded(input, 16.f), half = 0.5f + 0.5f * error_function(x * 0x1.6a09e6p-1f);
  return {input * half, half + x * exponential(-0.5f * x * x) * 0x1.988454p-2f};
}

// silu: with e = e^-x and s = 1 / (1 + e) the derivative is s + x s (1 - s), where 1 - s is e s: taken from 1, the error
// of a quotient near 1 would be multiplied by x.
template <class Real>
DS_KERNELS_INLINE Slope<Real> silu_slope(Real input) {
  const Real x = bounded(input, 80.f), e = exponential(-x), s = quotient(Real{} + 1.f, 1.f + e);
  return {select(input < -80.f, input * 0.f, input * s), select(input < -80.f, Real{}, s + x * s * (e * s))};
}

// The derivative of relu at 0 is 0.
template <Activation activation, class Real>
DS_KERNELS_INLINE Slope<Real> slope_of(Real x) {
  if constexpr (activation == Activation::Relu) {
    return {zero_if_negative(x), select(x > 0.f, Real{} + 1.f, Real{})};
  } else if constexpr (activation == Activation::Gelu) {
    return gelu_slope(x);
  } else if constexpr (activation == Activation::GeluTanh) {
    return gelu_tanh_slope(x);
  } else if constexpr (activation == Activation::Silu) {
    return silu_slope(x);
  } else {
    return {x, Real{} + 1.f};
  }
}

// The gradient of a normalised element's input: rstd (g - mean(g) - n mean(g n)), where g is the gradient of the result
// times weight, and n the normalised element before weight and bias (Ba et al. 2016). For RMS norm mean(g) is not taken
// away (Zhang & Sennrich 2019).
template <class Real>
DS_KERNELS_INLINE Real layer_norm_slope(Real g, Real n, float mean_g, float mean_gn, float rstd) {
  return rstd * (g - mean_g - n * mean_gn);
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
