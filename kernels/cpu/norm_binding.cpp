// The ops of <ds_kernels/ops/norm.h> for tensors in host memory.
#include <ds_kernels/ops/norm.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::NormOps<ds_kernels::cpu::Device>::implement(m); }
