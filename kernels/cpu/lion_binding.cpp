// The ops of <ds_kernels/ops/lion.h> for tensors in host memory.
#include <ds_kernels/ops/lion.h>

#include "device.h"
#include "one_tensor.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::LionOps<ds_kernels::cpu::Device>::implement(m); }

// lr, beta1, beta2, weight_decay
DS_KERNELS_ONE_TENSOR(lion, 3, 4) {
  const LionStep step = lion_step(one.number(0), one.number(1), one.number(2), one.number(3));
  return one.update("lion_", LionLists{one.tensors(), step});
}
