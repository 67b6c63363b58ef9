// Rows to normalise: what the ops of this family ask of a device. No torch.
#pragma once

#include <cstdint>

namespace ds_kernels {

// Layer norm or RMS norm of contiguous rows, all of one dtype. With s = input + residual + input_bias, or the input
// alone:
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
  float weight_offset;  // is added to the weight
  bool centred;  // layer norm; otherwise RMS norm
};

}  // namespace ds_kernels
