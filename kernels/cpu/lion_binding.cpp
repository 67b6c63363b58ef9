// The ops of <ds_kernels/ops/lion.h> for tensors in host memory.
#include <ds_kernels/ops/lion.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::LionOps<ds_kernels::cpu::Device>::implement(m); }
