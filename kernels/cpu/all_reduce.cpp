// Sums of the slots of several ranks. Compiled once per instruction-set level, without torch.
#include "all_reduce_loops.h"

#include "loops.h"

#include <ds_kernels/vec.h>

namespace ds_kernels::cpu {
namespace {

// In float32, rounded once: every rank adds in the same order, so all of them have the same bits.
template <class Element>
struct SumSlots {
  static void run(const SlotSum& work) {
    const SlotSum w = work;  // a copy, which the compiler knows the stores do not change
    auto* output = static_cast<Element*>(w.output);
    for_each_vector(w.elements, [=](int64_t i, auto memory) {
      Floats sum = memory.load(static_cast<const Element*>(w.slots[0]) + i);
      for (int64_t rank = 1; rank < w.ranks; ++rank) sum += memory.load(static_cast<const Element*>(w.slots[rank]) + i);
      memory.store(output + i, sum);
    });
  }
};

}  // namespace

template <>
const AllReduceLoops& loops() {
  static constexpr AllReduceLoops all{by_dtype<SumSlots>};
  return all;
}

}  // namespace ds_kernels::cpu
