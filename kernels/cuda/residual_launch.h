// What residual.cu offers to residual_binding.cpp.
#pragma once

#include <ds_kernels/config.h>
#include <ds_kernels/residual.h>

#include "stream.h"

namespace ds_kernels::cuda {

void launch_add_bias(const ResidualRows& rows, Dtype dtype, Stream stream);
void launch_mix(const MixRows& rows, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
