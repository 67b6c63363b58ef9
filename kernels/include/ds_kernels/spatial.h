// Rows of channels to add up: what the ops of this family ask of a device. No torch.
#pragma once

#include <cstdint>

namespace ds_kernels {

// output = input + bias + other + other_bias. Contiguous rows, all of one dtype; null stands for zero.
struct BiasRows {
  const void* input;
  const void* bias;  // one row
  const void* other;
  const void* other_bias;  // one row; only with `other`
  void* output;
  int64_t rows, columns;
};

}  // namespace ds_kernels
