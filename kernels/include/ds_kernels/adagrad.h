// Adagrad, one element (or one vector of elements) at a time. No torch, no operating system.
//
//   g <- g + wd p        s <- s + g^2        p <- p - lr g / (sqrt(s) + eps)
//
// (Duchi, Hazan & Singer 2011). No bias correction; the step number does not occur.
#pragma once

#include <ds_kernels/tensor_lists.h>
#include <ds_kernels/vec.h>

namespace ds_kernels {

struct AdagradStep {
  float lr, eps, weight_decay;
};

// What the op asks of a device: lists of parameters, gradients and sums of squares. The last two
// have the parameters' dtype, or are floats.
struct AdagradLists {
  TensorLists tensors;
  AdagradStep step;
};

inline namespace DS_KERNELS_CPU_LEVEL {

// Real is float or Floats.
template <class Real>
DS_KERNELS_INLINE void adagrad_update(Real& p, Real g, Real& sum, const AdagradStep& s) {
  // Without decay its term is left out, not multiplied by zero: an infinite parameter would turn into NaN.
  if (s.weight_decay != 0) g += s.weight_decay * p;
  sum += g * g;
  p -= quotient(s.lr * g, square_root(sum) + s.eps);
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
