// What the loops of activation.cpp offer to activation_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include <cstdint>

namespace ds_kernels {
enum class Activation : int;
}

namespace ds_kernels::cpu {

// Rows of `columns` elements, all of one dtype.
struct ActivationRows {
  const void* input;  // may be `output`; gated: rows of twice as many elements
  const void* bias;   // one row of input, or null
  void* output;
  int64_t columns;
};

// Works on rows [first, last).
using ActivationLoop = void (*)(const ActivationRows& rows, int64_t first, int64_t last);

struct ActivationLoops {
  ActivationLoop (*bias_activation)(Dtype, Activation);   // activation(input + bias)
  ActivationLoop (*gated_activation)(Dtype, Activation);  // of the halves: first * activation(second)
};

}  // namespace ds_kernels::cpu
