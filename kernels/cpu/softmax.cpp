// Softmax of a row of attention scores. Compiled once per instruction-set level, without torch.
#include "softmax_loops.h"
#include "by_dtype.h"
#include "row.h"

namespace ds_kernels::cpu {
namespace {

constexpr float kInfinity = __builtin_inff();

template <class Element, class Added>
void softmax(const SoftmaxRow& row, float* scratch) {
  const int64_t begin = row.begin, count = row.end - row.begin;
  const float scale = row.scale;
  const auto* input = static_cast<const Element*>(row.input) + begin;
  const auto* mask = row.mask ? static_cast<const Added*>(row.mask) + begin : nullptr;
  const auto* alibi = row.alibi ? static_cast<const Added*>(row.alibi) + begin : nullptr;
  auto* all = static_cast<Element*>(row.output);
  auto* output = all + begin;
  const float top = maximum_over(count, [=](int64_t i, auto memory) {
    Floats x = memory.load(input + i) * scale;
    if (mask) x += memory.load(mask + i);
    if (alibi) x += memory.load(alibi + i);
    memory.store(scratch + i, x);
    return x;
  });
  // Where every score is -inf nothing takes part: the sum stays 0, and so do the results.
  const float shift = top == -kInfinity ? 0.f : top;
  const float sum = sum_over(count, [=](int64_t i, auto memory) {
    const Floats e = exponential(memory.load(scratch + i) - shift);
    memory.store(scratch + i, e);
    return e;
  });
  const float factor = sum == 0 ? 0.f : 1.f / sum;
  for_each_vector(count, [=](int64_t i, auto memory) { memory.store(output + i, memory.load(scratch + i) * factor); });
  __builtin_memset(all, 0, begin * sizeof(Element));
  __builtin_memset(all + row.end, 0, (row.columns - row.end) * sizeof(Element));
}

template <class Element>
struct SoftmaxOwnMask {
  static void run(const SoftmaxRow& row, float* scratch) { softmax<Element, Element>(row, scratch); }
};
template <class Element>
struct SoftmaxFloatMask {
  static void run(const SoftmaxRow& row, float* scratch) { softmax<Element, float>(row, scratch); }
};

SoftmaxLoop choose(Dtype scores, bool float_mask) {
  return float_mask ? by_dtype<SoftmaxFloatMask>(scores) : by_dtype<SoftmaxOwnMask>(scores);
}

}  // namespace

inline namespace DS_KERNELS_CPU_LEVEL {
extern const SoftmaxLoops softmax_loops{choose};
}

}  // namespace ds_kernels::cpu
