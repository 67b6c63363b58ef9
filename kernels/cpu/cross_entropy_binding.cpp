// The op of <ds_kernels/ops/cross_entropy.h> for tensors in host memory.
#include <ds_kernels/ops/cross_entropy.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::CrossEntropyOps<ds_kernels::cpu::Device>::implement(m); }
