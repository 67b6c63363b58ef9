// What the loops of linear.cpp offer to linear_binding.cpp.
#pragma once

#include <ds_kernels/linear.h>

namespace ds_kernels::cpu {

// A linear layer on a few inputs. Bias, residual and output have the activations' dtype; absent ones are null.
struct LinearTask {
  int64_t inputs, columns, outputs;
  const float* input;  // [inputs, columns]
  const void* weight;  // [outputs, columns], or [2 outputs, columns] if gated
  int64_t stride;      // of a row of weights, in elements
  const float* scales; // [rows, groups] for int8 weights, else null
  int64_t groups;      // 1 without scales
  ShortInputs shorts;  // the same inputs in 16 bits, for int8 weights; null where they are not to be used
  const void* bias;
  const void* residual;  // [inputs, outputs]
  void* output;          // [inputs, outputs]
  Activation activation;
  bool gated;
};

// Computes outputs [begin, end) of every input.
using LinearLoop = void (*)(const LinearTask& task, int64_t begin, int64_t end);

// `count` elements to floats.
using WidenLoop = void (*)(const void* from, float* to, int64_t count);

// The inputs of a task in 16 bits; false if they cannot be had here, or have an element that is not finite.
using ShortenLoop = bool (*)(const LinearTask& task, int16_t* values, float* scales);

// Rows [begin, end) of int8 weights to `to`.
using DequantizeLoop = void (*)(const LinearTask& task, void* to, int64_t begin, int64_t end);

// Activation, gate and residual of inputs [begin, end), from sums with their bias, [inputs, rows].
using FinishLoop = void (*)(const LinearTask& task, const void* sums, int64_t begin, int64_t end);

struct LinearLoops {
  LinearLoop (*linear)(Dtype dtype, bool quantized);
  WidenLoop (*widen)(Dtype dtype);
  ShortenLoop shorten;
  DequantizeLoop (*dequantize)(Dtype dtype);
  FinishLoop (*finish)(Dtype dtype);
};

}  // namespace ds_kernels::cpu
