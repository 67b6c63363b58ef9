// LAMB, one element (or one vector of elements) at a time. No torch, no operating system.
//
//   g <- g / s                    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
//   u = m / (sqrt(v) + eps) + wd p                              or sqrt(v + eps)
//   r = ||p|| / ||u||             between two limits; 1 if a norm is 0
//   p <- p - lr sqrt(c2) / c1 r u
//
// with c1 = 1 - b1^t, c2 = 1 - b2^t after t steps, as DeepSpeed has it. You et al. 2020 (algorithm 2) divide m by c1 and
// v by c2 inside of u instead. r is known only when all of u is: a step is two loops over a tensor, and the second
// computes u again from what the first has stored.
#pragma once

#include <cmath>
#include <cstddef>

#include <ds_kernels/tensor_lists.h>
#include <ds_kernels/vec.h>

namespace ds_kernels {

// The tensor lists of a step, in their order. There may be no copies.
enum LambList { kParams, kGrads, kExpAvgs, kExpAvgSqs, kCopies, kLambLists };

struct LambOptions {
  double lr, beta1, beta2, eps, weight_decay, min_coeff, max_coeff, grad_scale;
  bool eps_inside_sqrt, bias_correction, correct_inside;
};

// The constants of one parameter's update, computed in double and rounded once.
struct LambStep {
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float eps_inside, eps_outside;  // of the square root
  float weight_decay;
  float inverse_scale;            // of the gradient
  float first, second;            // factors of the moments inside of u
  double step_size, min_coeff, max_coeff;
};

// What the op asks of a device: lists in the order of LambList, the last of which there may not be. Gradients of float
// parameters have any dtype.
struct LambLists {
  TensorLists tensors;
  Steps<LambStep> steps;
  float* ratios;  // the trust ratios, one for each tensor, in the tensors' memory
};

// Sums of the squares of p and u. In double: a product of floats is exact there, and never too large or too small.
struct LambSums {
  double param = 0, update = 0;
};

// The trust ratio. A NaN stays one: no comparison with it holds.
DS_KERNELS_INLINE double lamb_ratio(LambSums sums, const LambStep& s) {
  if (sums.param == 0 || sums.update == 0) return 1;
  const double ratio = std::sqrt(sums.param) / std::sqrt(sums.update);
  // As torch.clamp: a NaN stays, a limit's too, and the upper limit wins.
  const double least = ratio < s.min_coeff || s.min_coeff != s.min_coeff ? s.min_coeff : ratio;
  return least > s.max_coeff || s.max_coeff != s.max_coeff ? s.max_coeff : least;
}

// The sums over a tensor from those over its parts. Every sum is of terms that are not negative, so its relative error
// is at most 2^-53 for each addition in a row: with parts of 1024 elements less than (n / 1024 + 1024) 2^-53 for n
// elements, 1.1e-10 for 1e9.
inline LambSums lamb_total(const LambSums* parts, int64_t count) {
  LambSums total;
  for (int64_t i = 0; i < count; ++i) {
    total.param += parts[i].param;
    total.update += parts[i].update;
  }
  return total;
}

inline namespace DS_KERNELS_CPU_LEVEL {

inline LambStep lamb_step(const LambOptions& options, int64_t step) {
  const double c1 = options.bias_correction ? 1 - std::pow(options.beta1, static_cast<double>(step)) : 1;
  const double c2 = options.bias_correction ? 1 - std::pow(options.beta2, static_cast<double>(step)) : 1;
  LambStep s;
  s.beta1 = static_cast<float>(options.beta1);
  s.one_minus_beta1 = static_cast<float>(1 - options.beta1);
  s.beta2 = static_cast<float>(options.beta2);
  s.one_minus_beta2 = static_cast<float>(1 - options.beta2);
  s.eps_inside = options.eps_inside_sqrt ? static_cast<float>(options.eps) : 0;
  s.eps_outside = options.eps_inside_sqrt ? 0 : static_cast<float>(options.eps);
  s.weight_decay = static_cast<float>(options.weight_decay);
  s.inverse_scale = static_cast<float>(1 / options.grad_scale);
  s.first = options.correct_inside ? static_cast<float>(1 / c1) : 1;
  s.second = options.correct_inside ? static_cast<float>(1 / c2) : 1;
  s.step_size = options.correct_inside ? options.lr : options.lr * std::sqrt(c2) / c1;
  s.min_coeff = options.min_coeff;
  s.max_coeff = options.max_coeff;
  return s;
}

// Real is float or Floats, here and below.
template <class Real>
DS_KERNELS_INLINE void lamb_moments(Real g, Real& m, Real& v, const LambStep& s) {
  g *= s.inverse_scale;
  m = s.beta1 * m + s.one_minus_beta1 * g;
  v = s.beta2 * v + s.one_minus_beta2 * g * g;
}

// u, from the moments as they are stored.
template <class Real>
DS_KERNELS_INLINE Real lamb_direction(Real p, Real m, Real v, const LambStep& s) {
  Real u = quotient(s.first * m, square_root(s.second * v + s.eps_inside) + s.eps_outside);
  // Without decay its term is left out, not multiplied by zero: an infinite parameter would turn into NaN.
  if (s.weight_decay != 0) u += s.weight_decay * p;
  return u;
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
