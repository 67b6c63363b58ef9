// What rotary.cu offers to rotary_binding.cpp.
#pragma once

#include <ds_kernels/config.h>
#include <ds_kernels/rotary.h>

#include "stream.h"

namespace ds_kernels::cuda {

void launch_rotary(const char* op, const Rotation& rotation, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
