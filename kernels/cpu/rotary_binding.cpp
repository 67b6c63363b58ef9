// The ops of <ds_kernels/ops/rotary.h> for tensors in host memory.
#include <ds_kernels/op_functions.h>
#include <ds_kernels/ops/rotary.h>

#include "device.h"

DS_KERNELS_IMPL(CPU, m) { ds_kernels::RotaryOps<ds_kernels::cpu::Device>::implement(m); }
DS_KERNELS_OP_FUNCTION(rotary_, ds_kernels::RotaryOps<ds_kernels::cpu::Device>::rotary_)
