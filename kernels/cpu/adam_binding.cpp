// The ops of <ds_kernels/ops/adam.h> for tensors in host memory.
#include <ds_kernels/ops/adam.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::AdamOps<ds_kernels::cpu::Device>::implement(m); }
