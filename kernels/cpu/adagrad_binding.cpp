// The ops of <ds_kernels/ops/adagrad.h> for tensors in host memory.
#include <ds_kernels/ops/adagrad.h>

#include "device.h"
#include "optimizer_function.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::AdagradOps<ds_kernels::cpu::Device>::implement(m); }

// lr, eps, weight_decay
DS_KERNELS_OPTIMIZER_FUNCTION(adagrad, 3, 3) {
  const auto n = [&](size_t i) { return static_cast<float>(all.number(i)); };
  return all.update("adagrad_", AdagradLists{all.tensors(), AdagradStep{n(0), n(1), n(2)}});
}
