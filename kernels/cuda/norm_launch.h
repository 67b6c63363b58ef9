// What norm.cu offers to norm_binding.cpp.
#pragma once

#include <ds_kernels/config.h>
#include <ds_kernels/norm.h>

#include "stream.h"

namespace ds_kernels::cuda {

void launch_layer_norm(const NormRows& rows, Dtype dtype, Stream stream);
void launch_rms_norm(const NormRows& rows, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
