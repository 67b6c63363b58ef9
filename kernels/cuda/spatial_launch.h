// What spatial.cu offers to spatial_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include "stream.h"

namespace ds_kernels::cuda {

// Rows of `columns` elements (channels), and what is added to them. All of one dtype.
struct BiasRows {
  const void* input;
  const void* bias;        // [columns]
  const void* other;       // shape of input, or null
  const void* other_bias;  // [columns], or null
  void* output;
  int64_t rows, columns;
};

// output = input + bias + other + other_bias
void launch_bias_add(const char* op, const BiasRows& rows, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
