// Rows of elements: reaching them, and reductions over one in an order that depends on its length alone.
#pragma once

#include <ds_kernels/vec_math.h>

namespace ds_kernels::cpu {
inline namespace DS_KERNELS_CPU_LEVEL {

// Where a row of `columns` elements begins; null where there are no rows.
template <class Element>
DS_KERNELS_INLINE const Element* row_of(const void* rows, int64_t row, int64_t columns) {
  return rows ? static_cast<const Element*>(rows) + row * columns : nullptr;
}
template <class Element>
DS_KERNELS_INLINE Element* row_of(void* rows, int64_t row, int64_t columns) {
  return rows ? static_cast<Element*>(rows) + row * columns : nullptr;
}
// One row, the same for all: a bias, a weight.
template <class Element>
DS_KERNELS_INLINE const Element* one_row(const void* row) {
  return static_cast<const Element*>(row);
}

// x, with `otherwise` in the lanes that lie beyond the row's end.
DS_KERNELS_INLINE Floats within(WholeVector, Floats x, float) { return x; }
DS_KERNELS_INLINE Floats within(PartVector part, Floats x, float otherwise) {
  float lanes[kLanes];
  store_bits(lanes, x);
  for (int64_t lane = part.count; lane < kLanes; ++lane) lanes[lane] = otherwise;
  return load_bits<Floats>(lanes);
}

// A load from memory that is in the cache already: it fetches nothing ahead.
template <class Element>
DS_KERNELS_INLINE Floats load_again(WholeVector, const Element* from) {
  return load(from);
}
template <class Element>
DS_KERNELS_INLINE Floats load_again(PartVector part, const Element* from) {
  return part.load(from);
}

// The sum of `term(position, memory)` over a row of `count` elements; 0 of none. Sum is Floats, or a struct of them with
// `+=`. Four sums take turns, so that an addition does not wait for the one before it.
template <class Sum = Floats, class Term>
DS_KERNELS_INLINE Sum sums_over(int64_t count, Term term) {
  constexpr int kSums = 4;
  Sum sums[kSums] = {};
  int64_t position = 0;
  for (; position + kSums * kLanes <= count; position += kSums * kLanes) {
    for (int i = 0; i < kSums; ++i) sums[i] += term(position + i * kLanes, WholeVector{});
  }
  for (; position + kLanes <= count; position += kLanes) sums[0] += term(position, WholeVector{});
  if (position < count) sums[1] += term(position, PartVector{count - position});
  sums[0] += sums[1];
  sums[2] += sums[3];
  sums[0] += sums[2];
  return sums[0];
}

// The same as one number. Lanes of `term` beyond the row do not count.
template <class Term>
DS_KERNELS_INLINE float sum_over(int64_t count, Term term) {
  return sum_of(sums_over(count, [&](int64_t i, auto memory) { return within(memory, term(i, memory), 0.f); }));
}

// The largest `term(position, memory)`; -inf of none. Of a row with a NaN it is one of the terms, or NaN.
template <class Term>
DS_KERNELS_INLINE float maximum_over(int64_t count, Term term) {
  Floats top = Floats{} - __builtin_inff();
  for_each_vector(count, [&](int64_t position, auto memory) {
    top = maximum(top, within(memory, term(position, memory), -__builtin_inff()));
  });
  return maximum_of(top);
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels::cpu
