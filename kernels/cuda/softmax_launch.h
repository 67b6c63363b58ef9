// What softmax.cu offers to softmax_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include "stream.h"

namespace ds_kernels::cuda {

// Added to the scores: an element for each key, at `data` + batch, head and query times their strides, in elements.
struct Added {
  const void* data;  // or null
  int64_t batch, head, query;
};

// Scores [batch, heads, queries, keys], contiguous.
struct Scores {
  const void* input;  // may be `output`
  void* output;
  Added mask, alibi;
  int64_t batch, heads, queries, keys;
  int64_t window;  // of keys that a query sees, the last ones; 0: all
  float scale;
  bool causal;
};

// Mask and alibi are floats, or have the scores' dtype.
void launch_softmax(const char* op, const Scores& scores, Dtype dtype, bool float_mask, Stream stream);

}  // namespace ds_kernels::cuda
