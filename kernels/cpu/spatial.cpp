// Biases and residuals, channels last. Compiled once per instruction-set level, without torch.
#include "spatial_loops.h"
#include "by_dtype.h"

#include <ds_kernels/vec.h>

namespace ds_kernels::cpu {
namespace {

template <class Element>
struct BiasAdd {
  static void run(const BiasRows& rows, int64_t first, int64_t last) {
    const BiasRows r = rows;  // a copy, which the compiler knows the stores do not change
    const auto* bias = static_cast<const Element*>(r.bias);
    const auto* other_bias = static_cast<const Element*>(r.other_bias);
    for (int64_t row = first; row < last; ++row) {
      const auto* input = static_cast<const Element*>(r.input) + row * r.columns;
      const auto* other = r.other ? static_cast<const Element*>(r.other) + row * r.columns : nullptr;
      auto* output = static_cast<Element*>(r.output) + row * r.columns;
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

inline namespace DS_KERNELS_CPU_LEVEL {
extern const SpatialLoops spatial_loops{by_dtype<BiasAdd>};
}

}  // namespace ds_kernels::cpu
