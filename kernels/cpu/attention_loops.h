// What the loops of attention.cpp offer to attention_binding.cpp.
#pragma once

#include <ds_kernels/attention.h>

namespace ds_kernels::cpu {

// The positions of a head are shared among threads: parts of `part` positions.
struct AttentionTask : Attention {
  int64_t part, parts;
  float* partial;  // [batch, kv_heads, parts, group * tokens, 2 + head_dim]: top, sum, result

  int64_t items() const { return batch * kv_heads * parts; }
  int64_t partial_size() const { return group() * tokens * (2 + head_dim); }
};

struct AttentionLoops {
  // Appends keys and values, and attends, for items [begin, end) of (batch row, key's head, part).
  void (*attend)(Dtype, const AttentionTask&, int64_t begin, int64_t end);
  // Merges the parts of rows [begin, end) of (batch row, key's head) and writes them to the output.
  void (*finish)(Dtype, const AttentionTask&, int64_t begin, int64_t end);
  // Appends keys and values of rows [begin, end) of (batch row, key's head).
  void (*append)(Dtype, const Attention&, int64_t begin, int64_t end);
  // Whether queries and keys of rows [begin, end) of (batch row, key's head) are all finite.
  bool (*finite)(Dtype, const Attention&, int64_t begin, int64_t end);
  // All that is added to the scores, -inf where nothing may be attended to: rows [begin, end) of
  // [batch or 1, heads, tokens, total]. `heads` is 1 where all heads have one bias.
  void (*bias)(Dtype, const Attention&, int64_t heads, float* to, int64_t begin, int64_t end);
};

}  // namespace ds_kernels::cpu
