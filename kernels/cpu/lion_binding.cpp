// The ops of <ds_kernels/ops/lion.h> for tensors in host memory.
#include <ds_kernels/ops/lion.h>

#include "device.h"
#include "one_tensor.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::LionOps<ds_kernels::cpu::Device>::implement(m); }

DS_KERNELS_ONE_TENSOR(lion) {
  const double* n = one.numbers();  // lr, beta1, beta2, weight_decay
  one.update("lion_", LionLists{one.tensors(), lion_step(n[0], n[1], n[2], n[3])});
}
