// The ops of <ds_kernels/ops/adam.h> for tensors in host memory.
#include <ds_kernels/ops/adam.h>

#include "device.h"
#include "optimizer_function.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::AdamOps<ds_kernels::cpu::Device>::implement(m); }

// lr, beta1, beta2, eps, weight_decay, adamw, bias_correction, step
DS_KERNELS_OPTIMIZER_FUNCTION(adam, 4, 8) {
  const auto n = [&](size_t i) { return all.number(i); };
  if (!(n(7) >= 1)) return false;
  const AdamStep step = adam_step({n(0), n(1), n(2), n(3), n(4), n(5) != 0, n(6) != 0}, static_cast<int64_t>(n(7)));
  return all.update("adam_", AdamLists{all.tensors(), {&step, false}, false});
}
