// Additions to a residual. Compiled once per instruction-set level, without torch.
#include "residual_loops.h"
#include "by_dtype.h"

#include <ds_kernels/vec.h>

namespace ds_kernels::cpu {
namespace {

template <class Element>
const Element* row_of(const void* rows, int64_t row, int64_t columns) {
  return rows ? static_cast<const Element*>(rows) + row * columns : nullptr;
}

template <class Element>
struct AddBias {
  static void run(const ResidualRows& rows, int64_t first, int64_t last) {
    const ResidualRows r = rows;  // a copy, which the compiler knows the stores do not change
    const auto* attention_bias = row_of<Element>(r.attention_bias, 0, 0);
    const auto* final_bias = row_of<Element>(r.final_bias, 0, 0);
    for (int64_t row = first; row < last; ++row) {
      auto* residual = static_cast<Element*>(r.residual) + row * r.columns;
      const auto* hidden = row_of<Element>(r.hidden, row, r.columns);
      const auto* attention = row_of<Element>(r.attention, row, r.columns);
      for_each_vector(r.columns, [=](int64_t i, auto memory) {
        Floats scaled = memory.load(residual + i), sum = memory.load(hidden + i);
        if (attention) (r.scale_attention ? scaled : sum) += memory.load(attention + i);
        if (attention_bias) scaled += memory.load(attention_bias + i);
        if (final_bias) scaled += memory.load(final_bias + i);
        memory.store(residual + i, sum + r.scale * scaled);
      });
    }
  }
};

template <class Element>
struct Mix {
  static void run(const MixRows& rows, int64_t first, int64_t last) {
    const MixRows r = rows;
    const auto* output_weight = row_of<Element>(r.output_weight, 0, 0);
    const auto* residual_weight = row_of<Element>(r.residual_weight, 0, 0);
    for (int64_t row = first; row < last; ++row) {
      auto* output = static_cast<Element*>(r.output) + row * r.columns;
      const auto* residual = row_of<Element>(r.residual, row, r.columns);
      for_each_vector(r.columns, [=](int64_t i, auto memory) {
        memory.store(output + i, memory.load(output + i) * memory.load(output_weight + i) +
                                     memory.load(residual + i) * memory.load(residual_weight + i));
      });
    }
  }
};

}  // namespace

inline namespace DS_KERNELS_CPU_LEVEL {
extern const ResidualLoops residual_loops{by_dtype<AddBias>, by_dtype<Mix>};
}

}  // namespace ds_kernels::cpu
