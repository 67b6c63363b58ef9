// The ops of <ds_kernels/ops/adam.h> for tensors in host memory.
#include "adam_loops.h"

#include <ds_kernels/ops/adam.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(AdamLoops, adam_loops)

namespace {

struct Adam : Host {
  using Host::Host;

  void update(const MultiTensor& tensors, const std::vector<AdamStep>& steps) const {
    const AdamLoops& loops = loops_for(tensors.op(), all_adam_loops());
    run_loop(loops.update(tensors.dtype(0), tensors.is_float(1), tensors.is_float(2)), tensors, steps);
  }
  void rollback(const MultiTensor& tensors, const std::vector<AdamStep>& steps) const {
    run_loop(loops_for(tensors.op(), all_adam_loops()).rollback, tensors, steps);
  }

  static void run_loop(AdamLoop loop, const MultiTensor& tensors, const std::vector<AdamStep>& steps) {
    run<4>(tensors, [&](void** at, size_t tensor, int64_t count) {
      loop(at[0], at[1], at[2], at[3], count, steps[steps.size() == 1 ? 0 : tensor]);
    });
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { AdamOps<Adam>::implement(m); }

}  // namespace ds_kernels::cpu
