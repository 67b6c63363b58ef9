// What attention.cu offers to attention_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include "stream.h"

namespace ds_kernels::cuda {

enum class Mask : int { None, Bool, Float, Element };

// Elements from one batch row, head and token to the next; those of one head lie together.
struct HeadStrides {
  int64_t batch, head, token;
};

constexpr int64_t kMostHeadDim = 256;

// Attention of `tokens` queries of each head, the last ones of `total` positions, of which the cache held `past`.
struct AttentionTask {
  int64_t batch, heads, kv_heads, tokens, past, total, head_dim;
  const void *query, *key, *value;
  HeadStrides query_strides, key_strides, value_strides;
  void *key_cache, *value_cache;
  HeadStrides key_cache_strides, value_cache_strides;
  void* output;  // [batch, tokens, heads, head_dim]
  float scale;
  Mask mask_kind;
  const void* mask;
  int64_t mask_strides[4];
  const float* alibi;  // [heads], or null
  int64_t window;      // 0 for all positions
  bool causal;
  float* partial;  // room for attention_partial(task) floats
};

int64_t attention_partial(const AttentionTask& task);

// Appends keys and values to the cache and attends to all of it: for few queries.
void launch_attention(const char* op, const AttentionTask& task, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
