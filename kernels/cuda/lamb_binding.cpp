// The ops of <ds_kernels/ops/lamb.h> for tensors on CUDA devices.
#include <ds_kernels/ops/lamb.h>

#include "device.h"

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { ds_kernels::LambOps<ds_kernels::cuda::Device>::implement(m); }
