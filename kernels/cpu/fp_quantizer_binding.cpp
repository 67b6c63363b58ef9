// The ops of <ds_kernels/ops/fp_quantizer.h> for tensors in host memory.
#include <ds_kernels/ops/fp_quantizer.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::FpQuantizerOps<ds_kernels::cpu::Device>::implement(m); }
