// The ops of <ds_kernels/ops/adam.h> for tensors in host memory.
#include <ds_kernels/ops/adam.h>

#include "device.h"
#include "one_tensor.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::AdamOps<ds_kernels::cpu::Device>::implement(m); }

DS_KERNELS_ONE_TENSOR(adam) {
  const double* n = one.numbers();  // lr, beta1, beta2, eps, weight_decay, adamw, bias_correction
  const AdamStep step = adam_step({n[0], n[1], n[2], n[3], n[4], n[5] != 0, n[6] != 0}, one.step());
  one.update("adam_", AdamLists{one.tensors(), {&step, false}, false});
}
