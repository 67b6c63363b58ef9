// Adam and AdamW, one element (or one vector of elements) at a time. No torch, no operating system.
//
//   m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2        g is g + wd p in Adam with L2 decay
//   p <- p - lr wd p - (lr / c1) m / (sqrt(v) / sqrt(c2) + eps)   the first term in AdamW only
//
// with c1 = 1 - b1^t, c2 = 1 - b2^t after t steps (Kingma & Ba 2015, Loshchilov & Hutter 2019).
#pragma once

#include <cmath>

#include <ds_kernels/tensor_lists.h>
#include <ds_kernels/vec.h>

namespace ds_kernels {

// The constants of one parameter's update, computed in double and rounded once.
struct AdamStep {
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float eps;
  float step_size;     // lr / c1
  float inverse_root;  // 1 / sqrt(c2)
  float l2;            // weight decay added to the gradient
  float decay;         // lr times weight decay, taken from the parameter itself
};

// What the ops of this family ask of a device: lists of parameters, gradients, first and second moments. Gradients and
// moments have the parameters' dtype, or are floats.
struct AdamLists {
  TensorLists tensors;
  Steps<AdamStep> steps;
  bool rollback;  // undoes a step; all lists are floats
};

struct AdamOptions {
  double lr, beta1, beta2, eps, weight_decay;
  bool adamw, bias_correction;
};

inline namespace DS_KERNELS_CPU_LEVEL {

inline AdamStep adam_step(const AdamOptions& options, int64_t step) {
  const double c1 = options.bias_correction ? 1 - std::pow(options.beta1, static_cast<double>(step)) : 1;
  const double c2 = options.bias_correction ? 1 - std::pow(options.beta2, static_cast<double>(step)) : 1;
  AdamStep s;
  s.beta1 = static_cast<float>(options.beta1);
  s.one_minus_beta1 = static_cast<float>(1 - options.beta1);
  s.beta2 = static_cast<float>(options.beta2);
  s.one_minus_beta2 = static_cast<float>(1 - options.beta2);
  s.eps = static_cast<float>(options.eps);
  s.step_size = static_cast<float>(options.lr / c1);
  s.inverse_root = static_cast<float>(1 / std::sqrt(c2));
  s.l2 = options.adamw ? 0 : static_cast<float>(options.weight_decay);
  s.decay = options.adamw ? static_cast<float>(options.lr * options.weight_decay) : 0;
  return s;
}

// Real is float or Floats.
template <class Real>
DS_KERNELS_INLINE void adam_update(Real& p, Real g, Real& m, Real& v, const AdamStep& s) {
  // Without decay its terms are left out, not multiplied by zero: an infinite parameter would turn into NaN.
  if (s.l2 != 0) g += s.l2 * p;
  m = s.beta1 * m + s.one_minus_beta1 * g;
  v = s.beta2 * v + s.one_minus_beta2 * g * g;
  Real change = quotient(s.step_size * m, square_root(v) * s.inverse_root + s.eps);
  if (s.decay != 0) change += s.decay * p;
  p -= change;
}

// Undoes adam_update in its AdamW form, up to rounding. A parameter that cannot be recovered becomes 0, as in
// DeepSpeed; v, which rounding could leave just below 0, does not become negative.
template <class Real>
DS_KERNELS_INLINE void adam_rollback(Real& p, Real g, Real& m, Real& v, const AdamStep& s) {
  const Real change = quotient(s.step_size * m, square_root(v) * s.inverse_root + s.eps);
  p = zero_unless_finite((p + change) / (1 - s.decay));
  m = (m - s.one_minus_beta1 * g) / s.beta1;
  v = zero_if_negative((v - s.one_minus_beta2 * g * g) / s.beta2);
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
