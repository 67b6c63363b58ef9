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

// tanh within 2^-23; exact enough for a bound on logits, whose errors are as large.
template <class Real>
DS_KERNELS_INLINE Real bounded_by_one(Real x) {
  return 1.f - quotient(Real{} + 2.f, 1.f + exponential(x + x));
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
