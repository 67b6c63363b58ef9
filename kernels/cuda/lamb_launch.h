// What lamb.cu offers to lamb_binding.cpp.
#pragma once

#include <ds_kernels/lamb.h>

#include "stream.h"
#include "tensor_lists.h"

namespace ds_kernels::cuda {

struct LambDtypes {
  Dtype params, grads, states, copies;
};

// How many LambSums of device memory a step needs.
int64_t lamb_parts(const std::vector<int64_t>& numels);

// Parameters, gradients, first and second moments, copies (null addresses if there are none); one LambStep for all
// tensors, or one each. The trust ratios go to `ratios` on the device, one for each tensor; the host waits for nothing.
void lamb_update(const TensorLists& tensors, const LambDtypes& dtypes, const std::vector<LambStep>& steps,
                 LambSums* parts, float* ratios, Stream stream);

}  // namespace ds_kernels::cuda
