// What softmax.cu offers to softmax_binding.cpp.
#pragma once

#include <ds_kernels/config.h>
#include <ds_kernels/softmax.h>

#include "stream.h"

namespace ds_kernels::cuda {

void launch_softmax(const char* op, const Scores& scores, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
