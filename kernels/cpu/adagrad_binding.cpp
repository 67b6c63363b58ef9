// The ops of <ds_kernels/ops/adagrad.h> for tensors in host memory.
#include <ds_kernels/ops/adagrad.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::AdagradOps<ds_kernels::cpu::Device>::implement(m); }
