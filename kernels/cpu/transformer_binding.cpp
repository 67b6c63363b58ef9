// The ops of <ds_kernels/ops/transformer.h> for tensors in host memory.
#include <ds_kernels/op_functions.h>
#include <ds_kernels/ops/transformer.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::TransformerOps<ds_kernels::cpu::Device>::implement(m); }
DS_KERNELS_OP_FUNCTION(activation_and_mul, ds_kernels::TransformerOps<ds_kernels::cpu::Device>::activation_and_mul)
