// The ops of <ds_kernels/ops/norm.h> for tensors in host memory.
#include <ds_kernels/op_functions.h>
#include <ds_kernels/ops/norm.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::NormOps<ds_kernels::cpu::Device>::implement(m); }
DS_KERNELS_OP_FUNCTION(layer_norm, ds_kernels::NormOps<ds_kernels::cpu::Device>::layer_norm)
DS_KERNELS_OP_FUNCTION(rms_norm, ds_kernels::NormOps<ds_kernels::cpu::Device>::rms_norm)
