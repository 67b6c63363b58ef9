// The ops of <ds_kernels/ops/adagrad.h> for tensors in host memory.
#include "adagrad_loops.h"

#include <ds_kernels/ops/adagrad.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(AdagradLoops, adagrad_loops)

namespace {

struct Adagrad : Host {
  using Host::Host;

  void update(const MultiTensor& tensors, const AdagradStep& step) const {
    const AdagradLoops& loops = loops_for(tensors.op(), all_adagrad_loops());
    const AdagradLoop loop = loops.update(tensors.dtype(0), tensors.is_float(1), tensors.is_float(2));
    run<3>(tensors, [&](void** at, size_t, int64_t count) { loop(at[0], at[1], at[2], count, step); });
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { AdagradOps<Adagrad>::implement(m); }

}  // namespace ds_kernels::cpu
