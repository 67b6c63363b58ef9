// Lion's loop. Compiled once per instruction-set level, without torch.
#include <ds_kernels/lion.h>

#include "loops.h"

namespace ds_kernels::cpu {
namespace {

template <class Param, class Grad, class State>
struct LionUpdate {
  static void run(void* params, const void* grads, void* exp_avgs, int64_t count, const LionStep& step) {
    auto* p = static_cast<Param*>(params);
    auto* g = static_cast<const Grad*>(grads);
    auto* m = static_cast<State*>(exp_avgs);
    const LionStep s = step;  // a copy, which the compiler knows the stores do not change
    for_each_vector<StreamedVector>(count, [=](int64_t i, auto memory) {
      Floats param = memory.load(p + i), first = memory.load(m + i);
      lion_update(param, memory.load(g + i), first, s);
      memory.store(p + i, param);
      memory.store(m + i, first);
    });
  }
};

}  // namespace

template <>
void compute(const LionLists& lion, Dtype, const Threads& threads) {
  const auto loop = by_dtypes<LionUpdate>(lion.tensors);
  share_elements<3>(threads, lion.tensors, [&](void** at, size_t, int64_t count) {
    loop(at[0], at[1], at[2], count, lion.step);
  });
}

}  // namespace ds_kernels::cpu
