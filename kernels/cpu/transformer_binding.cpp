// The ops of <ds_kernels/ops/transformer.h> for tensors in host memory.
#include <ds_kernels/ops/transformer.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::TransformerOps<ds_kernels::cpu::Device>::implement(m); }
