// Adam's loops. Compiled once per instruction-set level, without torch.
#include <ds_kernels/adam.h>

#include "loops.h"

namespace ds_kernels::cpu {
namespace {

// Updates `count` elements in place: calls `change(param, grad, first, second)` on vectors of the elements.
template <class Param, class Grad, class State, class Change>
DS_KERNELS_INLINE void for_each(void* params, const void* grads, void* exp_avgs, void* exp_avg_sqs, int64_t count,
                                Change change) {
  auto* p = static_cast<Param*>(params);
  auto* g = static_cast<const Grad*>(grads);
  auto* m = static_cast<State*>(exp_avgs);
  auto* v = static_cast<State*>(exp_avg_sqs);
  for_each_vector<StreamedVector>(count, [=](int64_t i, auto memory) {
    Floats param = memory.load(p + i), first = memory.load(m + i), second = memory.load(v + i);
    change(param, memory.load(g + i), first, second);
    memory.store(p + i, param);
    memory.store(m + i, first);
    memory.store(v + i, second);
  });
}

// The step is copied into the loop: the compiler must not think that the stores change it.
template <class Param, class Grad, class State>
struct AdamUpdate {
  static void run(void* params, const void* grads, void* exp_avgs, void* exp_avg_sqs, int64_t count,
                  const AdamStep& step) {
    for_each<Param, Grad, State>(
        params, grads, exp_avgs, exp_avg_sqs, count,
        [step](Floats& p, Floats g, Floats& m, Floats& v) { adam_update(p, g, m, v, step); });
  }
};

void rollback(void* params, const void* grads, void* exp_avgs, void* exp_avg_sqs, int64_t count, const AdamStep& step) {
  for_each<float, float, float>(
      params, grads, exp_avgs, exp_avg_sqs, count,
      [step](Floats& p, Floats g, Floats& m, Floats& v) { adam_rollback(p, g, m, v, step); });
}

}  // namespace

template <>
void compute(const AdamLists& adam, Dtype, const Threads& threads) {
  const auto loop = adam.rollback ? rollback : by_dtypes<AdamUpdate>(adam.tensors);
  share_elements<4>(threads, adam.tensors, [&](void** at, size_t tensor, int64_t count) {
    loop(at[0], at[1], at[2], at[3], count, adam.steps.of(tensor));
  });
}

}  // namespace ds_kernels::cpu
