// What linear.cu offers to linear_binding.cpp.
#pragma once

#include <ds_kernels/activation.h>

#include "stream.h"

namespace ds_kernels::cuda {

// A linear layer: y = activation(W x + b) + residual, gated: h1 activation(h2) + residual, [h1; h2] = W x + b. All but
// int8 weights and scales are of one dtype; absent ones are null.
struct LinearTask {
  int64_t inputs, columns, outputs;
  const void* input;    // [inputs, columns]
  const void* weight;   // [rows, columns], rows being outputs, or twice as many if gated
  int64_t stride;       // of a row of weights, in elements
  const float* scales;  // [rows, groups] for int8 weights, else null
  int64_t groups;       // 1 without scales
  const void* bias;     // [rows]
  const void* residual;  // [inputs, outputs]
  void* output;          // [inputs, outputs]
  Activation activation;
  bool gated;

  int64_t rows() const { return gated ? 2 * outputs : outputs; }
};

// All of it, for few inputs: each weight is read once for four of them.
void launch_linear(const char* op, const LinearTask& task, Dtype dtype, Stream stream);
// int8 weights as `dtype`, to [rows, columns].
void launch_dequantize_weight(const char* op, const LinearTask& task, void* to, Dtype dtype, Stream stream);
// Activation, gate and residual of sums with their bias, [inputs, rows]; they may be the output.
void launch_linear_finish(const char* op, const LinearTask& task, const void* sums, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
