// What the loops of softmax.cpp offer to softmax_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include <cstdint>

namespace ds_kernels::cpu {

// One row of scores. Columns outside of [begin, end) take no part: their results are zero.
struct SoftmaxRow {
  const void* input;  // may be `output`
  void* output;
  const void* mask;   // added to the scaled scores, or null
  const void* alibi;  // as mask
  int64_t columns, begin, end;
  float scale;
};

// `scratch` has room for one row of floats.
using SoftmaxLoop = void (*)(const SoftmaxRow& row, float* scratch);

struct SoftmaxLoops {
  // Mask and alibi are floats, or have the scores' dtype.
  SoftmaxLoop (*softmax)(Dtype scores, bool float_mask);
};

}  // namespace ds_kernels::cpu
