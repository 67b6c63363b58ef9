// The ops of <ds_kernels/ops/lion.h> for tensors in host memory.
#include <ds_kernels/ops/lion.h>

#include "device.h"
#include "optimizer_function.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::LionOps<ds_kernels::cpu::Device>::implement(m); }

// lr, beta1, beta2, weight_decay
DS_KERNELS_OPTIMIZER_FUNCTION(lion, 3, 4) {
  const LionStep step = lion_step(all.number(0), all.number(1), all.number(2), all.number(3));
  return all.update("lion_", LionLists{all.tensors(), step});
}
