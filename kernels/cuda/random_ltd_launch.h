// What random_ltd.cu offers to random_ltd_binding.cpp.
#pragma once

#include <ds_kernels/random_ltd.h>

#include "stream.h"

namespace ds_kernels::cuda {

void launch_token_sort(const char* op, const TokenRows& rows, Stream stream);
void launch_token_gather(const char* op, const TokenMove& move, Stream stream);
// `last` has room for batch * sequence numbers.
void launch_token_scatter(const char* op, const TokenMove& move, int32_t* last, Stream stream);
void launch_mask_gather(const char* op, const MaskGather& mask, Stream stream);

}  // namespace ds_kernels::cuda
