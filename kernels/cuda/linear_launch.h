// What linear.cu offers to linear_binding.cpp.
#pragma once

#include <ds_kernels/linear.h>

#include "stream.h"

namespace ds_kernels::cuda {

// All of a layer, for few inputs: each weight is read once for four of them.
void launch_linear(const char* op, const LinearLayer& layer, Dtype dtype, Stream stream);
// Activation, gate and residual of sums with their bias, [inputs, rows]; they may be the output.
void launch_linear_finish(const char* op, const LinearLayer& layer, const void* sums, Dtype dtype, Stream stream);
void launch_dequantize_weight(const char* op, const QuantizedRows& rows, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
