// What adam.cu offers to adam_binding.cpp.
#pragma once

#include <ds_kernels/adam.h>

#include "stream.h"
#include "tensor_lists.h"

namespace ds_kernels::cuda {

// Parameters, gradients, first and second moments; one AdamStep for all tensors, or one each.
void adam_update(const TensorLists& tensors, Dtype params, bool float_grads, bool float_states,
                 const std::vector<AdamStep>& steps, Stream stream);

// float only.
void adam_rollback(const TensorLists& tensors, const std::vector<AdamStep>& steps, Stream stream);

}  // namespace ds_kernels::cuda
