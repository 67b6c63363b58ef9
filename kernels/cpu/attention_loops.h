// What the loops of attention.cpp offer to attention_binding.cpp.
#pragma once

#include <ds_kernels/attention.h>

namespace ds_kernels::cpu {

enum class Mask : int { None, Bool, Float, Element };

// Elements from one batch row, head and token to the next; those of one head lie together.
struct HeadStrides {
  int64_t batch, head, token;
  int64_t at(int64_t b, int64_t h, int64_t t) const { return b * batch + h * head + t * token; }
};

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
  // The positions of a head are shared among threads: parts of `part` positions.
  int64_t part, parts;
  float* partial;  // [batch, kv_heads, parts, heads / kv_heads * tokens, 2 + head_dim]: top, sum, result

  int64_t group() const { return heads / kv_heads; }
  int64_t items() const { return batch * kv_heads * parts; }
  int64_t partial_size() const { return group() * tokens * (2 + head_dim); }
};

struct AttentionLoops {
  // Appends keys and values, and attends, for items [begin, end) of (batch row, key's head, part).
  void (*attend)(Dtype, const AttentionTask&, int64_t begin, int64_t end);
  // Merges the parts of rows [begin, end) of (batch row, key's head) and writes them to the output.
  void (*finish)(Dtype, const AttentionTask&, int64_t begin, int64_t end);
  // Appends keys and values of rows [begin, end) of (batch row, key's head).
  void (*append)(Dtype, const AttentionTask&, int64_t begin, int64_t end);
  // Whether queries and keys of rows [begin, end) of (batch row, key's head) are all finite.
  bool (*finite)(Dtype, const AttentionTask&, int64_t begin, int64_t end);
  // All that is added to the scores, -inf where nothing may be attended to: rows [begin, end) of
  // [batch or 1, heads, tokens, total]. `heads` is 1 where all heads have one bias.
  void (*bias)(Dtype, const AttentionTask&, int64_t heads, float* to, int64_t begin, int64_t end);
};

}  // namespace ds_kernels::cpu
