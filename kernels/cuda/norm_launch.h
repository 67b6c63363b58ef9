// What norm.cu offers to norm_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include "stream.h"

namespace ds_kernels::cuda {

// Rows of `columns` elements each, all of one dtype. With s = input + residual + input_bias, or the input alone:
struct NormRows {
  const void* input;
  const void* residual;    // or null
  const void* input_bias;  // one row, or null
  const void* weight;      // one row
  const void* bias;        // one row, or null for none
  void* output;            // s, normalised
  void* sum;               // s, or null
  int64_t rows, columns;
  float eps;
};

void launch_layer_norm(const NormRows& rows, Dtype dtype, Stream stream);
void launch_rms_norm(const NormRows& rows, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
