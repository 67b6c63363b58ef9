// The ops of <ds_kernels/ops/random_ltd.h> for tensors in host memory.
#include <ds_kernels/ops/random_ltd.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::RandomLTDOps<ds_kernels::cpu::Device>::implement(m); }
