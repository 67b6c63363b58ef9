// Cross entropy of rows of logits and its gradient. Compiled once per instruction-set level, without torch.
#include <ds_kernels/cross_entropy.h>

#include "loops.h"
#include "row.h"

namespace ds_kernels::cpu {
namespace {

// Writes the gradient of a row over its logits. `y` is the row as floats, bounded by the soft cap.
template <class Element>
void write_gradient(const CrossEntropyRows& r, Element* logits, const float* y, int64_t target, float top,
                    float factor) {
  const float everywhere = r.label_smoothing / static_cast<float>(r.columns);
  const float per_cap = r.softcap == 0 ? 0.f : 1.f / r.softcap;
  const auto gradient = [=](Floats at, Floats x, float there) {
    const Floats of_y = exponential(at - top) * factor - everywhere - there;
    return per_cap == 0 ? of_y : of_y * bounded_slope(x * per_cap);
  };
  const Floats of_target =
      gradient(Floats{} + y[target], PartVector{1}.load(logits + target), 1.f - r.label_smoothing);
  for_each_vector(r.columns, [=](int64_t i, auto memory) {
    memory.store(logits + i, gradient(load_again(memory, y + i), load_again(memory, logits + i), 0.f));
  });
  PartVector{1}.store(logits + target, of_target);
}

// The loss of a row. `y` has room for it as floats.
template <class Element>
float cross_entropy(const CrossEntropyRows& r, int64_t row, float* y) {
  auto* logits = row_of<Element>(r.logits, row, r.columns);
  const int64_t target = r.target[row];
  if (target == r.ignore_index) {
    if (r.gradient) for_each_vector(r.columns, [=](int64_t i, auto memory) { memory.store(logits + i, Floats{}); });
    return 0.f;
  }
  const float cap = r.softcap, per_cap = cap == 0 ? 0.f : 1.f / cap;
  const float top = maximum_over(r.columns, [=](int64_t i, auto memory) {
    Floats x = memory.load(logits + i);
    if (cap != 0) x = cap * bounded_by_one(x * per_cap);
    memory.store(y + i, x);
    return x;
  });
  const float sum = sum_over(r.columns, [=](int64_t i, auto memory) {
    return exponential(load_again(memory, y + i) - top);
  });
  const float log_sum = __builtin_logf(sum), logsumexp = top + log_sum;
  float loss = log_sum - (1.f - r.label_smoothing) * (y[target] - top) + r.z_loss * logsumexp * logsumexp;
  if (r.label_smoothing != 0) {
    const float below = sum_over(r.columns, [=](int64_t i, auto memory) { return load_again(memory, y + i) - top; });
    loss -= r.label_smoothing * below / static_cast<float>(r.columns);
  }
  if (r.gradient) write_gradient(r, logits, y, target, top, (1.f + 2.f * r.z_loss * logsumexp) / sum);
  return loss;
}

template <class Element>
struct CrossEntropy {
  static void run(const CrossEntropyRows& rows, int64_t first, int64_t last, float* scratch) {
    const CrossEntropyRows r = rows;  // a copy, which the compiler knows the stores do not change
    for (int64_t row = first; row < last; ++row) r.loss[row] = cross_entropy<Element>(r, row, scratch);
  }
};

}  // namespace

template <>
void compute(const TargetCheck& c, Dtype, const Threads&) {
  for (int64_t row = 0; row < c.rows; ++row) {
    const int64_t target = c.target[row];
    if ((target < 0 || target >= c.columns) && target != c.ignore_index) {
      *c.wrong = c.target + row;
      return;
    }
  }
}

template <>
void compute(const CrossEntropyRows& r, Dtype dtype, const Threads& threads) {
  share_rows_with_scratch(threads, by_dtype<CrossEntropy>(dtype), r);
}

}  // namespace ds_kernels::cpu
