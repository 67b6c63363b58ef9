// The ops of <ds_kernels/ops/adagrad.h> for tensors in host memory.
#include <ds_kernels/ops/adagrad.h>

#include "device.h"
#include "one_tensor.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::AdagradOps<ds_kernels::cpu::Device>::implement(m); }

DS_KERNELS_ONE_TENSOR(adagrad) {
  const double* n = one.numbers();  // lr, eps, weight_decay
  const AdagradStep step{static_cast<float>(n[0]), static_cast<float>(n[1]), static_cast<float>(n[2])};
  one.update("adagrad_", AdagradLists{one.tensors(), step});
}
