// The ops of <ds_kernels/ops/lion.h> for tensors in host memory.
#include "lion_loops.h"

#include <ds_kernels/ops/lion.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(LionLoops, lion_loops)

namespace {

struct Lion : Host {
  using Host::Host;

  void update(const MultiTensor& tensors, const LionStep& step) const {
    const LionLoops& loops = loops_for(tensors.op(), all_lion_loops());
    const LionLoop loop = loops.update(tensors.dtype(0), tensors.is_float(1), tensors.is_float(2));
    run<3>(tensors, [&](void** at, size_t, int64_t count) { loop(at[0], at[1], at[2], count, step); });
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { LionOps<Lion>::implement(m); }

}  // namespace ds_kernels::cpu
