// The ops of <ds_kernels/ops/softmax.h> for tensors in host memory.
#include <ds_kernels/ops/softmax.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::SoftmaxOps<ds_kernels::cpu::Device>::implement(m); }
