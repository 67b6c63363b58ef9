// The ops of <ds_kernels/ops/adagrad.h> for tensors in host memory.
#include <ds_kernels/ops/adagrad.h>

#include "device.h"
#include "one_tensor.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::AdagradOps<ds_kernels::cpu::Device>::implement(m); }

// lr, eps, weight_decay
DS_KERNELS_ONE_TENSOR(adagrad, 3, 3) {
  const auto n = [&](size_t i) { return static_cast<float>(one.number(i)); };
  return one.update("adagrad_", AdagradLists{one.tensors(), AdagradStep{n(0), n(1), n(2)}});
}
