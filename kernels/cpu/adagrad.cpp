// Adagrad's loop. Compiled once per instruction-set level, without torch.
#include "adagrad_loops.h"
#include "choose.h"

namespace ds_kernels::cpu {
namespace {

template <class Param, class Grad, class State>
struct AdagradUpdate {
  static void run(void* params, const void* grads, void* state_sums, int64_t count, const AdagradStep& step) {
    auto* p = static_cast<Param*>(params);
    auto* g = static_cast<const Grad*>(grads);
    auto* sums = static_cast<State*>(state_sums);
    const AdagradStep s = step;  // a copy, which the compiler knows the stores do not change
    for_each_vector(count, [=](int64_t i, auto memory) {
      Floats param = memory.load(p + i), sum = memory.load(sums + i);
      adagrad_update(param, memory.load(g + i), sum, s);
      memory.store(p + i, param);
      memory.store(sums + i, sum);
    });
  }
};

}  // namespace

inline namespace DS_KERNELS_CPU_LEVEL {
extern const AdagradLoops adagrad_loops{choose<AdagradUpdate>};
}

}  // namespace ds_kernels::cpu
