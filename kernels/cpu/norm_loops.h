// What the loops of norm.cpp offer to norm_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include <cstdint>

namespace ds_kernels::cpu {

// Rows of `columns` elements each, all of one dtype. With s = input + residual + input_bias, or the input alone:
struct NormRows {
  const void* input;
  const void* residual;    // or null
  const void* input_bias;  // one row, or null
  const void* weight;      // one row
  const void* bias;        // one row, or null for none
  void* output;            // s, normalised
  void* sum;               // s, or null
  int64_t columns;
  float eps;
};

// Normalises rows [first, last); `scratch` has room for one row of floats.
using NormLoop = void (*)(const NormRows& rows, int64_t first, int64_t last, float* scratch);

struct NormLoops {
  NormLoop (*layer_norm)(Dtype);
  NormLoop (*rms_norm)(Dtype);
};

}  // namespace ds_kernels::cpu
