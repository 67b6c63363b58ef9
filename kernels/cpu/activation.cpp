// Activations with their bias. Compiled once per instruction-set level, without torch.
#include <ds_kernels/activation.h>

#include "loops.h"
#include "row.h"

namespace ds_kernels::cpu {
namespace {

template <Activation activation>
struct Bias {
  template <class Element>
  struct Loop {
    static void run(const ActivationRows& rows, int64_t first, int64_t last) {
      const int64_t columns = rows.columns;
      const auto* bias = one_row<Element>(rows.bias);
      for (int64_t row = first; row < last; ++row) {
        const auto* input = row_of<Element>(rows.input, row, columns);
        auto* output = row_of<Element>(rows.output, row, columns);
        for_each_vector(columns, [=](int64_t i, auto memory) {
          Floats x = memory.load(input + i);
          if (bias) x += memory.load(bias + i);
          memory.store(output + i, activate<activation>(x));
        });
      }
    }
  };
};

template <Activation activation>
struct Gated {
  template <class Element>
  struct Loop {
    static void run(const ActivationRows& rows, int64_t first, int64_t last) {
      const int64_t columns = rows.columns;
      const auto* bias = one_row<Element>(rows.bias);
      for (int64_t row = first; row < last; ++row) {
        const auto* values = row_of<Element>(rows.input, row, 2 * columns);
        const auto* gates = values + columns;
        auto* output = row_of<Element>(rows.output, row, columns);
        for_each_vector(columns, [=](int64_t i, auto memory) {
          Floats value = memory.load(values + i), gate = memory.load(gates + i);
          if (bias) value += memory.load(bias + i), gate += memory.load(bias + columns + i);
          memory.store(output + i, value * activate<activation>(gate));
        });
      }
    }
  };
};

}  // namespace

template <>
void compute(const ActivationRows& rows, Dtype dtype, const Threads& threads) {
  with_activation(rows.activation, [&](auto activation) {
    const auto loop = rows.gated ? by_dtype<Gated<activation>::template Loop>(dtype)
                                 : by_dtype<Bias<activation>::template Loop>(dtype);
    share_rows(threads, loop, rows);
  });
}

}  // namespace ds_kernels::cpu
