// The ops of <ds_kernels/ops/activation.h> for tensors in host memory.
#include <ds_kernels/ops/activation.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::ActivationOps<ds_kernels::cpu::Device>::implement(m); }
