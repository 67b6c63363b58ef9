// What adagrad.cu offers to adagrad_binding.cpp.
#pragma once

#include <ds_kernels/adagrad.h>

#include "stream.h"
#include "tensor_lists.h"

namespace ds_kernels::cuda {

// Parameters, gradients, sums of squares.
void adagrad_update(const TensorLists& tensors, Dtype params, bool float_grads, bool float_states,
                    const AdagradStep& step, Stream stream);

}  // namespace ds_kernels::cuda
