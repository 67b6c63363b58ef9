// What activation.cu offers to activation_binding.cpp.
#pragma once

#include <ds_kernels/activation.h>

#include "stream.h"

namespace ds_kernels::cuda {

// activation(input + bias)
void launch_bias_activation(const ActivationRows& rows, Dtype dtype, Activation activation, Stream stream);
// Of the halves: first * activation(second).
void launch_gated_activation(const ActivationRows& rows, Dtype dtype, Activation activation, Stream stream);

}  // namespace ds_kernels::cuda
