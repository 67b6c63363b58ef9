// Activations, one element or one vector of elements at a time. No torch, no operating system.
//
//   relu       max(x, 0)
//   gelu       x/2 (1 + erf(x / sqrt 2))                                        (Hendrycks & Gimpel 2016)
//   gelu_tanh  x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))                    (its approximation there)
//   silu       x / (1 + e^-x)
//
// NaN stays NaN; where x is infinite and its factor zero, the result is NaN, as torch's.
#pragma once

#include <type_traits>

#include <ds_kernels/vec_math.h>

namespace ds_kernels {

// In the order of ds_plugin_sdk.ops._activations.ACTIVATIONS.
enum class Activation : int { Identity, Relu, Gelu, GeluTanh, Silu };
constexpr int kActivations = 5;

// output = activation(input + bias); gated: the first half of that times the activation of the second. Contiguous rows,
// all of one dtype: what the ops of this family ask of a device.
struct ActivationRows {
  const void* input;  // may be `output`; gated: rows of twice as many elements
  const void* bias;   // one row of input, or null
  void* output;
  int64_t rows, columns;
  Activation activation;
  bool gated;
};

inline namespace DS_KERNELS_CPU_LEVEL {

// An activation as a type, for templates.
template <Activation activation>
using ActivationConstant = std::integral_constant<Activation, activation>;

// Calls `with(ActivationConstant<activation>{})`; what is none of them counts as the first.
template <class With>
auto with_activation(Activation activation, const With& with) {
  switch (activation) {
    case Activation::Relu: return with(ActivationConstant<Activation::Relu>{});
    case Activation::Gelu: return with(ActivationConstant<Activation::Gelu>{});
    case Activation::GeluTanh: return with(ActivationConstant<Activation::GeluTanh>{});
    case Activation::Silu: return with(ActivationConstant<Activation::Silu>{});
    default: return with(ActivationConstant<Activation::Identity>{});
  }
}

template <Activation activation, class Real>
DS_KERNELS_INLINE Real activate(Real x) {
  if constexpr (activation == Activation::Relu) {
    return zero_if_negative(x);
  } else if constexpr (activation == Activation::Gelu) {
    return 0.5f * x * (1.f + error_function(x * 0x1.6a09e6p-1f));
  } else if constexpr (activation == Activation::GeluTanh) {
    // x/2 (1 + tanh u) is x / (1 + e^-2u), which loses nothing where tanh is near -1.
    return quotient(x, 1.f + exponential(x * (-0x1.988454p0f - 0x1.2444f2p-4f * x * x)));
  } else if constexpr (activation == Activation::Silu) {
    return quotient(x, 1.f + exponential(-x));
  } else {
    return x;
  }
}

template <Activation activation, class Real>
DS_KERNELS_INLINE Real activate(ActivationConstant<activation>, Real x) {
  return activate<activation>(x);
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
