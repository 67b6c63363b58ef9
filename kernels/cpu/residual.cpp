// Additions to a residual. Compiled once per instruction-set level, without torch.
#include <ds_kernels/residual.h>

#include "loops.h"
#include "row.h"

namespace ds_kernels::cpu {
namespace {

template <class Element>
struct AddBias {
  static void run(const ResidualRows& rows, int64_t first, int64_t last) {
    const ResidualRows r = rows;  // a copy, which the compiler knows the stores do not change
    const auto* attention_bias = one_row<Element>(r.attention_bias);
    const auto* final_bias = one_row<Element>(r.final_bias);
    for (int64_t row = first; row < last; ++row) {
      auto* residual = row_of<Element>(r.residual, row, r.columns);
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
    const auto* output_weight = one_row<Element>(r.output_weight);
    const auto* residual_weight = one_row<Element>(r.residual_weight);
    for (int64_t row = first; row < last; ++row) {
      auto* output = row_of<Element>(r.output, row, r.columns);
      const auto* residual = row_of<Element>(r.residual, row, r.columns);
      for_each_vector(r.columns, [=](int64_t i, auto memory) {
        memory.store(output + i, memory.load(output + i) * memory.load(output_weight + i) +
                                     memory.load(residual + i) * memory.load(residual_weight + i));
      });
    }
  }
};

}  // namespace

template <>
void compute(const ResidualRows& r, Dtype dtype, const Threads& threads) {
  share_rows(threads, by_dtype<AddBias>(dtype), r);
}

template <>
void compute(const MixRows& r, Dtype dtype, const Threads& threads) {
  share_rows(threads, by_dtype<Mix>(dtype), r);
}

}  // namespace ds_kernels::cpu
