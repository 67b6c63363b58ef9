// Lion, one element (or one vector of elements) at a time. No torch, no operating system.
//
//   c <- b1 m + (1 - b1) g        p <- p - lr wd p - lr sign(c)        m <- b2 m + (1 - b2) g
//
// (Chen et al. 2023). sign(0) is 0, of either zero; sign(NaN) is NaN: a broken gradient shows in the parameters.
#pragma once

#include <ds_kernels/tensor_lists.h>
#include <ds_kernels/vec.h>

namespace ds_kernels {

// The constants of an update, computed in double and rounded once.
struct LionStep {
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float lr;
  float decay;  // lr times weight decay
};

// What the op asks of a device: lists of parameters, gradients and moments. The last two
// have the parameters' dtype, or are floats.
struct LionLists {
  TensorLists tensors;
  LionStep step;
};

inline namespace DS_KERNELS_CPU_LEVEL {

inline LionStep lion_step(double lr, double beta1, double beta2, double weight_decay) {
  return {static_cast<float>(beta1), static_cast<float>(1 - beta1), static_cast<float>(beta2),
          static_cast<float>(1 - beta2), static_cast<float>(lr), static_cast<float>(lr * weight_decay)};
}

// Real is float or Floats.
template <class Real>
DS_KERNELS_INLINE void lion_update(Real& p, Real g, Real& m, const LionStep& s) {
  Real change = s.lr * sign(s.beta1 * m + s.one_minus_beta1 * g);
  // Without decay its term is left out, not multiplied by zero: an infinite parameter would turn into NaN.
  if (s.decay != 0) change += s.decay * p;
  p -= change;
  m = s.beta2 * m + s.one_minus_beta2 * g;
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
