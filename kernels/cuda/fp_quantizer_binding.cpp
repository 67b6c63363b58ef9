// The ops of <ds_kernels/ops/fp_quantizer.h> for tensors on CUDA devices.
#include <ds_kernels/ops/fp_quantizer.h>

#include "device.h"

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { ds_kernels::FpQuantizerOps<ds_kernels::cuda::Device>::implement(m); }
