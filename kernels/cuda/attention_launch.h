// What attention.cu offers to attention_binding.cpp.
#pragma once

#include <ds_kernels/attention.h>

#include "stream.h"

namespace ds_kernels::cuda {

constexpr int64_t kMostHeadDim = 256;

// Floats that a launch takes room for.
int64_t attention_partial(const Attention& attention);

// Appends keys and values to the cache and attends to all of it: for few queries.
// What torch's attention adds to scores, rows of `stride` elements of the query's dtype; and whether each query may attend
// to anything, 1 or 0. Batches and heads are 1 where all have the same.
struct AttentionBias {
  int64_t batches, heads, stride;
  void* data;
  float* sees;
};
AttentionBias attention_bias(const Attention& attention);
void launch_attention_bias(const char* op, const Attention& attention, const AttentionBias& bias, Dtype dtype,
                           Stream stream);
// Makes zeros of the output of queries that may attend to nothing.
void launch_attention_zeros(const char* op, const Attention& attention, const AttentionBias& bias, Dtype dtype,
                            Stream stream);

void launch_attention(const char* op, const Attention& attention, float* partial, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
