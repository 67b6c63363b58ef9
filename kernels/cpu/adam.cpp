// Adam's loops. Compiled once per instruction-set level, without torch.
#include "adam_loops.h"

namespace ds_kernels::cpu {
inline namespace DS_KERNELS_CPU_LEVEL {

template <class Param, class Grad, class State>
void update(void* params, const void* grads, void* exp_avgs, void* exp_avg_sqs, int64_t count, const AdamStep& step) {
  auto* p = static_cast<Param*>(params);
  auto* g = static_cast<const Grad*>(grads);
  auto* m = static_cast<State*>(exp_avgs);
  auto* v = static_cast<State*>(exp_avg_sqs);
  const AdamStep s = step;  // a copy that the stores below cannot alias
  for_each_vector(count, [=](int64_t i, auto memory) {
    Floats param = memory.load(p + i), first = memory.load(m + i), second = memory.load(v + i);
    adam_update(param, memory.load(g + i), first, second, s);
    memory.store(p + i, param);
    memory.store(m + i, first);
    memory.store(v + i, second);
  });
}

void rollback(void* params, const void* grads, void* exp_avgs, void* exp_avg_sqs, int64_t count, const AdamStep& step) {
  auto* p = static_cast<float*>(params);
  auto* g = static_cast<const float*>(grads);
  auto* m = static_cast<float*>(exp_avgs);
  auto* v = static_cast<float*>(exp_avg_sqs);
  const AdamStep s = step;
  for_each_vector(count, [=](int64_t i, auto memory) {
    Floats param = memory.load(p + i), first = memory.load(m + i), second = memory.load(v + i);
    adam_rollback(param, memory.load(g + i), first, second, s);
    memory.store(p + i, param);
    memory.store(m + i, first);
    memory.store(v + i, second);
  });
}

template <class Param>
AdamLoop update_of(bool float_grads, bool float_states) {
  if (float_grads) return float_states ? update<Param, float, float> : update<Param, float, Param>;
  return float_states ? update<Param, Param, float> : update<Param, Param, Param>;
}

AdamLoop choose_update(Dtype params, bool float_grads, bool float_states) {
  switch (params) {
    case Dtype::BFloat16: return update_of<BFloat16>(float_grads, float_states);
    case Dtype::Float16: return update_of<Float16>(float_grads, float_states);
    default: return update<float, float, float>;
  }
}

extern const AdamLoops adam_loops{choose_update, rollback};

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels::cpu
