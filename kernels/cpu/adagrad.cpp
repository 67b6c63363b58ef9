// Adagrad's loop. Compiled once per instruction-set level, without torch.
#include <ds_kernels/adagrad.h>

#include "loops.h"

namespace ds_kernels::cpu {
namespace {

template <class Param, class Grad, class State>
struct AdagradUpdate {
  static void run(void* params, const void* grads, void* state_sums, int64_t count, const AdagradStep& step) {
    auto* p = static_cast<Param*>(params);
    auto* g = static_cast<const Grad*>(grads);
    auto* sums = static_cast<State*>(state_sums);
    const AdagradStep s = step;  // a copy, which the compiler knows the stores do not change
    for_each_vector<StreamedVector>(count, [=](int64_t i, auto memory) {
      Floats param = memory.load(p + i), sum = memory.load(sums + i);
      adagrad_update(param, memory.load(g + i), sum, s);
      memory.store(p + i, param);
      memory.store(sums + i, sum);
    });
  }
};

}  // namespace

template <>
void compute(const AdagradLists& adagrad, Dtype, const Threads& threads) {
  const auto loop = by_dtypes<AdagradUpdate>(adagrad.tensors);
  share_elements<3>(threads, adagrad.tensors, [&](void** at, size_t, int64_t count) {
    loop(at[0], at[1], at[2], count, adagrad.step);
  });
}

}  // namespace ds_kernels::cpu
