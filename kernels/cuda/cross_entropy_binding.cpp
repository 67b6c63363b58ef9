// The op of <ds_kernels/ops/cross_entropy.h> for tensors on CUDA devices.
#include <ds_kernels/ops/cross_entropy.h>

#include "device.h"

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { ds_kernels::CrossEntropyOps<ds_kernels::cuda::Device>::implement(m); }
