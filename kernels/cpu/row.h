// Reductions over a row of elements, in an order that depends on its length alone.
#pragma once

#include <ds_kernels/vec_math.h>

namespace ds_kernels::cpu {
inline namespace DS_KERNELS_CPU_LEVEL {

// x, with `otherwise` in the lanes that lie beyond the row's end.
DS_KERNELS_INLINE Floats within(WholeVector, Floats x, float) { return x; }
DS_KERNELS_INLINE Floats within(PartVector part, Floats x, float otherwise) {
  float lanes[kLanes];
  store_bits(lanes, x);
  for (int64_t lane = part.count; lane < kLanes; ++lane) lanes[lane] = otherwise;
  return load_bits<Floats>(lanes);
}

// The sum of `term(position, memory)` over a row of `count` elements; 0 of none. Two sums take turns, so that an
// addition does not wait for the one before it.
template <class Term>
DS_KERNELS_INLINE float sum_over(int64_t count, Term term) {
  Floats even{}, odd{};
  int64_t position = 0;
  for (; position + 2 * kLanes <= count; position += 2 * kLanes) {
    even += term(position, WholeVector{});
    odd += term(position + kLanes, WholeVector{});
  }
  if (position + kLanes <= count) {
    even += term(position, WholeVector{});
    position += kLanes;
  }
  if (position < count) {
    const PartVector rest{count - position};
    odd += within(rest, term(position, rest), 0.f);
  }
  return sum_of(even + odd);
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
