// What attention.cu offers to attention_binding.cpp.
#pragma once

#include <ds_kernels/attention.h>

#include "stream.h"

namespace ds_kernels::cuda {

constexpr int64_t kMostHeadDim = 256;

// Floats that a launch takes room for.
int64_t attention_partial(const Attention& attention);

// Appends keys and values to the cache and attends to all of it: for few queries.
void launch_attention(const char* op, const Attention& attention, float* partial, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
