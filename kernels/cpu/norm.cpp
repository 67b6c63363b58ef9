// Layer norm and RMS norm, row by row. Compiled once per instruction-set level, without torch.
//
// A row is gathered as floats first, where it is not float already or has terms to be added. Two passes over it, which
// lies in the first-level cache then, give mean and variance. The second one finds what rounding took from the mean as
// well, and corrects both for it (Chan, Golub & LeVeque 1983): rows far from zero lose no digits.
#include <ds_kernels/norm.h>

#include "loops.h"
#include "row.h"

namespace ds_kernels::cpu {
namespace {

// The elements of a row as floats: s in NormRows.
template <class Element>
const float* gather(const NormRows& n, int64_t row, float* scratch) {
  const Element* input = row_of<Element>(n.input, row, n.columns);
  const Element* residual = row_of<Element>(n.residual, row, n.columns);
  const Element* input_bias = one_row<Element>(n.input_bias);
  Element* sum = row_of<Element>(n.sum, row, n.columns);
  if constexpr (sizeof(Element) == sizeof(float)) {
    if (!residual && !input_bias) return input;
  }
  for_each_vector(n.columns, [=](int64_t i, auto memory) {
    Floats x = memory.load(input + i);
    if (residual) x += memory.load(residual + i);
    if (input_bias) x += memory.load(input_bias + i);
    if (sum) memory.store(sum + i, x);
    memory.store(scratch + i, x);
  });
  return scratch;
}

// output = ((row - centre) * factor + shift) * (weight + its offset) + bias
template <class Element>
void finish(const NormRows& n, int64_t row, const float* x, float centre, float factor, float shift) {
  const Element* weight = one_row<Element>(n.weight);
  const Element* bias = one_row<Element>(n.bias);
  Element* output = row_of<Element>(n.output, row, n.columns);
  for_each_vector(n.columns, [=, offset = n.weight_offset](int64_t i, auto memory) {
    const Floats w = load_again(memory, weight + i) + offset;
    Floats y = ((load_again(memory, x + i) - centre) * factor + shift) * w;
    if (bias) y += load_again(memory, bias + i);
    memory.store(output + i, y);
  });
}

// Sums of a row's differences from its centre, and of their squares.
struct Moments {
  Floats first, second;

  DS_KERNELS_INLINE void operator+=(const Moments& more) {
    first += more.first;
    second += more.second;
  }
};

template <class Element>
struct LayerNorm {
  static void run(const NormRows& rows, int64_t first, int64_t last, float* scratch) {
    const NormRows n = rows;  // a copy, which the compiler knows the stores do not change
    for (int64_t row = first; row < last; ++row) {
      const float* x = gather<Element>(n, row, scratch);
      const float centre = sum_over(n.columns, [=](int64_t i, auto memory) { return memory.load(x + i); }) / n.columns;
      const Moments moments = sums_over<Moments>(n.columns, [=](int64_t i, auto memory) {
        const Floats difference = within(memory, load_again(memory, x + i) - centre, 0.f);
        return Moments{difference, difference * difference};
      });
      const float error = sum_of(moments.first) / n.columns;
      const float variance = sum_of(moments.second) / n.columns - error * error;
      const float factor = 1.f / square_root((variance < 0.f ? 0.f : variance) + n.eps);  // rounding; a NaN stays
      finish<Element>(n, row, x, centre, factor, -error * factor);
    }
  }
};

template <class Element>
struct RmsNorm {
  static void run(const NormRows& rows, int64_t first, int64_t last, float* scratch) {
    const NormRows n = rows;
    for (int64_t row = first; row < last; ++row) {
      const float* x = gather<Element>(n, row, scratch);
      const float squares = sum_over(n.columns, [=](int64_t i, auto memory) {
        const Floats value = memory.load(x + i);
        return value * value;
      });
      finish<Element>(n, row, x, 0.f, 1.f / square_root(squares / n.columns + n.eps), 0.f);
    }
  }
};

}  // namespace

template <>
void compute(const NormRows& n, Dtype dtype, const Threads& threads) {
  share_rows_with_scratch(threads, n.centred ? by_dtype<LayerNorm>(dtype) : by_dtype<RmsNorm>(dtype), n);
}

}  // namespace ds_kernels::cpu
