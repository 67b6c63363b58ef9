// What spatial.cu offers to spatial_binding.cpp.
#pragma once

#include <ds_kernels/config.h>
#include <ds_kernels/spatial.h>

#include "stream.h"

namespace ds_kernels::cuda {

void launch_bias_add(const char* op, const BiasRows& rows, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
