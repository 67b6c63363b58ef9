// The ops of <ds_kernels/ops/spatial.h> for tensors in host memory.
#include <ds_kernels/ops/spatial.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::SpatialOps<ds_kernels::cpu::Device>::implement(m); }
