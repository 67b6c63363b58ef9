// Heads to turn: what the ops of this family ask of a device. No torch.
#pragma once

#include <cstdint>

namespace ds_kernels {

// Where heads lie: strides of batch, head and token, in elements. The elements of a head lie one after the other.
struct Heads {
  void* data;
  int64_t batch, head, token;
};

// Turns the first rotary_dim elements of each head in pairs, by its token's angles, and copies the others.
struct Rotation {
  Heads input, output;  // may be the same
  const float* cos;     // [batch or 1, tokens, rotary_dim / 2]
  const float* sin;
  int64_t cos_batch, sin_batch;  // strides of batch in them
  int64_t batch, tokens;
  int heads, head_dim, rotary_dim;
  bool interleaved;  // element 2i is turned with 2i + 1; otherwise i with i + rotary_dim / 2
};

}  // namespace ds_kernels
