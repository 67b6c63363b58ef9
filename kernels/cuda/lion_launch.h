// What lion.cu offers to lion_binding.cpp.
#pragma once

#include <ds_kernels/lion.h>

#include "stream.h"
#include "tensor_lists.h"

namespace ds_kernels::cuda {

// Parameters, gradients, first moments.
void lion_update(const TensorLists& tensors, Dtype params, bool float_grads, bool float_states, const LionStep& step,
                 Stream stream);

}  // namespace ds_kernels::cuda
