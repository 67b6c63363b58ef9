// The ops of <ds_kernels/ops/residual.h> for tensors in host memory.
#include <ds_kernels/op_functions.h>
#include <ds_kernels/ops/residual.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::ResidualOps<ds_kernels::cpu::Device>::implement(m); }
DS_KERNELS_OP_FUNCTION(residual_add_bias_, ds_kernels::ResidualOps<ds_kernels::cpu::Device>::residual_add_bias_)
