// What the loops of residual.cpp offer to residual_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include <cstdint>

namespace ds_kernels::cpu {

// Rows of `columns` elements each, all of one dtype; null stands for zero.
struct ResidualRows {
  void* residual;
  const void* hidden;
  const void* attention;
  const void* attention_bias;  // one row
  const void* final_bias;      // one row
  int64_t columns;
  float scale;
  bool scale_attention;
};

struct MixRows {
  void* output;
  const void* residual;
  const void* residual_weight;  // one row
  const void* output_weight;    // one row
  int64_t columns;
};

struct ResidualLoops {
  // residual = hidden + scale (residual + attention_bias + final_bias) + attention; that is scaled too if told so
  void (*(*add_bias)(Dtype))(const ResidualRows& rows, int64_t first, int64_t last);
  // output = output * output_weight + residual * residual_weight
  void (*(*mix)(Dtype))(const MixRows& rows, int64_t first, int64_t last);
};

}  // namespace ds_kernels::cpu
