// What residual.cu offers to residual_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include "stream.h"

namespace ds_kernels::cuda {

// Rows of `columns` elements each, all of one dtype; null stands for zero.
struct ResidualRows {
  void* residual;
  const void* hidden;
  const void* attention;
  const void* attention_bias;  // one row
  const void* final_bias;      // one row
  int64_t rows, columns;
  float scale;
  bool scale_attention;
};

struct MixRows {
  void* output;
  const void* residual;
  const void* residual_weight;  // one row
  const void* output_weight;    // one row
  int64_t rows, columns;
};

// residual = hidden + scale (residual + attention_bias + final_bias) + attention; that is scaled too if told so
void launch_add_bias(const ResidualRows& rows, Dtype dtype, Stream stream);
// output = output * output_weight + residual * residual_weight
void launch_mix(const MixRows& rows, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
