// The formulas of the activations, in double.
#pragma once

#include <algorithm>
#include <cmath>

#include <ds_kernels/activation.h>

namespace ds_kernels {

inline double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::Relu: return std::max(x, 0.0);
    case Activation::Gelu: return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::GeluTanh: return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::Silu: return x / (1 + std::exp(-x));
    default: return x;
  }
}

}  // namespace ds_kernels
