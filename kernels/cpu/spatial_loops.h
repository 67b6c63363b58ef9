// What the loops of spatial.cpp offer to spatial_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

namespace ds_kernels::cpu {

// Rows of `columns` elements (channels), and what is added to them. All of one dtype.
struct BiasRows {
  const void* input;
  const void* bias;        // [columns]
  const void* other;       // shape of input, or null
  const void* other_bias;  // [columns], or null
  void* output;
  int64_t columns;
};

// output = input + bias + other + other_bias, for rows [first, last).
using BiasLoop = void (*)(const BiasRows& rows, int64_t first, int64_t last);

struct SpatialLoops {
  BiasLoop (*bias_add)(Dtype);
};

}  // namespace ds_kernels::cpu
