// What rotary.cu offers to rotary_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include "stream.h"

namespace ds_kernels::cuda {

// Where heads lie: strides of batch, head and token, in elements. The elements of a head lie one after the other.
struct Heads {
  void* data;
  int64_t batch, head, token;
};

struct Rotation {
  Heads input, output;  // may be the same
  const float* cos;     // [batch or 1, tokens, rotary_dim / 2]
  const float* sin;
  int64_t cos_batch, sin_batch;  // strides of batch in them
  int64_t batch, tokens;
  int heads, head_dim, rotary_dim;
};

// Interleaved: element 2i is turned with 2i + 1; otherwise i with i + rotary_dim / 2.
void launch_rotary(const char* op, const Rotation& rotation, bool interleaved, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
