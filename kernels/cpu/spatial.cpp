// Biases and residuals, channels last. Compiled once per instruction-set level, without torch.
#include <ds_kernels/spatial.h>

#include "loops.h"
#include "row.h"

namespace ds_kernels::cpu {
namespace {

template <class Element>
struct BiasAdd {
  static void run(const BiasRows& rows, int64_t first, int64_t last) {
    const BiasRows r = rows;  // a copy, which the compiler knows the stores do not change
    const auto* bias = one_row<Element>(r.bias);
    const auto* other_bias = one_row<Element>(r.other_bias);
    for (int64_t row = first; row < last; ++row) {
      const auto* input = row_of<Element>(r.input, row, r.columns);
      const auto* other = row_of<Element>(r.other, row, r.columns);
      auto* output = row_of<Element>(r.output, row, r.columns);
      for_each_vector(r.columns, [=](int64_t i, auto memory) {
        Floats sum = memory.load(input + i) + memory.load(bias + i);
        if (other) {
          Floats second = memory.load(other + i);
          if (other_bias) second += memory.load(other_bias + i);
          sum += second;
        }
        memory.store(output + i, sum);
      });
    }
  }
};

}  // namespace

template <>
void compute(const BiasRows& r, Dtype dtype, const Threads& threads) {
  share_rows(threads, by_dtype<BiasAdd>(dtype), r);
}

}  // namespace ds_kernels::cpu
