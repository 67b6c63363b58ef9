// Scores of attention: what the ops of this family ask of a device. No torch.
#pragma once

#include <cstdint>

namespace ds_kernels {

// Added to the scaled scores: an element for each key, at `data` + batch, head and query times their strides, in
// elements.
struct Added {
  const void* data;  // or null
  int64_t batch, head, query;
};

// Scores [batch, heads, queries, keys], contiguous. The last query is at the last key's position.
struct Scores {
  const void* input;  // may be `output`
  void* output;
  Added mask, alibi;
  int64_t batch, heads, queries, keys;
  int64_t window;  // of keys that a query sees, the last ones; 0: all
  float scale;
  bool causal;
  bool float_mask;  // mask and alibi are floats, or have the scores' dtype
};

}  // namespace ds_kernels
