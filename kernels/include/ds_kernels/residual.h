// Rows to add up: what the ops of this family ask of a device. No torch.
#pragma once

#include <cstdint>

namespace ds_kernels {

// residual = hidden + scale (residual + attention_bias + final_bias) + attention; attention is scaled too if told so.
// Contiguous rows, all of one dtype; null stands for zero.
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

// output = output * output_weight + residual * residual_weight
struct MixRows {
  void* output;
  const void* residual;
  const void* residual_weight;  // one row
  const void* output_weight;    // one row
  int64_t rows, columns;
};

}  // namespace ds_kernels
