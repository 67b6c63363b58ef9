// Softmax of attention scores, row by row. Compiled once per instruction-set level, without torch.
#include <ds_kernels/softmax.h>

#include "loops.h"
#include "row.h"

namespace ds_kernels::cpu {
namespace {

constexpr float kInfinity = __builtin_inff();

// Keys outside of [begin, end) take no part: their results are zero, unless the row has a NaN.
struct Keys {
  int64_t begin, end;

  Keys(const Scores& s, int64_t query) {
    const int64_t position = s.keys - s.queries + query;
    end = s.causal ? within(position + 1, s.keys) : s.keys;
    begin = s.window ? within(position + 1 - s.window, end) : 0;
  }

 private:
  static int64_t within(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }
};

template <class Element>
const Element* row_added(const Added& added, int64_t batch, int64_t head, int64_t query) {
  if (!added.data) return nullptr;
  return static_cast<const Element*>(added.data) + batch * added.batch + head * added.head + query * added.query;
}

// `scratch` has room for one row of floats.
template <class Element, class AddedElement>
void softmax(const Scores& s, int64_t row, float* scratch) {
  const int64_t query = row % s.queries, head = row / s.queries % s.heads, batch = row / s.queries / s.heads;
  const Keys keys(s, query);
  const int64_t begin = keys.begin, count = keys.end - begin;
  const float scale = s.scale;
  const auto* input = row_of<Element>(s.input, row, s.keys) + begin;
  const auto* mask = row_added<AddedElement>(s.mask, batch, head, query);
  const auto* alibi = row_added<AddedElement>(s.alibi, batch, head, query);
  if (mask) mask += begin;
  if (alibi) alibi += begin;
  auto* all = row_of<Element>(s.output, row, s.keys);
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
  const float outside = factor == factor ? 0.f : factor;  // a NaN reaches the whole row
  for_each_vector(begin, [=](int64_t i, auto memory) { memory.store(all + i, Floats{} + outside); });
  auto* rest = all + keys.end;
  for_each_vector(s.keys - keys.end, [=](int64_t i, auto memory) { memory.store(rest + i, Floats{} + outside); });
}

template <class Element, class AddedElement>
void softmax_rows(const Scores& scores, int64_t first, int64_t last, float* scratch) {
  const Scores s = scores;  // a copy, which the compiler knows the stores do not change
  for (int64_t row = first; row < last; ++row) softmax<Element, AddedElement>(s, row, scratch);
}

// Mask and alibi have the scores' dtype, or are floats.
template <class Element>
struct SoftmaxOwnMask {
  static void run(const Scores& s, int64_t first, int64_t last, float* scratch) {
    softmax_rows<Element, Element>(s, first, last, scratch);
  }
};
template <class Element>
struct SoftmaxFloatMask {
  static void run(const Scores& s, int64_t first, int64_t last, float* scratch) {
    softmax_rows<Element, float>(s, first, last, scratch);
  }
};

}  // namespace

template <>
void compute(const Scores& s, Dtype dtype, const Threads& threads) {
  const auto loop = s.float_mask ? by_dtype<SoftmaxFloatMask>(dtype) : by_dtype<SoftmaxOwnMask>(dtype);
  share_with_scratch<float>(threads, s.batch * s.heads * s.queries, grain_of(s.keys), s.keys,
                            [&](int64_t first, int64_t last, float* scratch) { loop(s, first, last, scratch); });
}

}  // namespace ds_kernels::cpu
