// Attention of the Evoformer: what the ops ask of a device. No torch, no operating system.
//
//   s_j = query . key_j scale + mask_bias[j] + pair_bias[i, j]        p_j = e^(s_j - l),  l = log(sum of e^s_j)
//   output = sum of p_j value_j
//
// and, with g the gradient of the output and d = g . output,
//
//   ds_j = p_j (g . value_j - d)        query: sum of ds_j key_j scale,  key_j: ds_j query scale,  value_j: p_j g
//
// (Jumper et al. 2021; the derivative from l as Dao et al. 2022 have it.) A query whose scores are all minus infinity
// gives 0, and gets no gradient.
#pragma once

#include <ds_kernels/vec_math.h>

namespace ds_kernels {

// What a call of either op has. Tensors of [batch, rows, tokens, heads, head_dim] are contiguous, as all others.
struct EvoformerShape {
  int64_t batch, rows, tokens, heads, head_dim;

  // Where an element [b, n, t, h, 0] is.
  DS_KERNELS_INLINE int64_t at(int64_t b, int64_t n, int64_t t, int64_t h) const {
    return (((b * rows + n) * tokens + t) * heads + h) * head_dim;
  }
  // Where l of [b, n, h, t] is.
  DS_KERNELS_INLINE int64_t sum_at(int64_t b, int64_t n, int64_t h, int64_t t) const {
    return ((b * rows + n) * heads + h) * tokens + t;
  }
};

struct EvoformerInputs {
  EvoformerShape shape;
  float scale;
  const void *query, *key, *value;
  const void* mask_bias;  // [batch, rows, tokens], or null
  const void* pair_bias;  // [batch, heads, tokens, tokens], or null
};

struct EvoformerAttention {
  EvoformerInputs in;
  void* output;
  float* logsumexp;  // [batch, rows, heads, tokens]
};

struct EvoformerBackward {
  EvoformerInputs in;
  const void *grad, *output;
  const float* logsumexp;
  void *query_grad, *key_grad, *value_grad;
  float *mask_grad, *pair_grad;  // null where they are not wanted
};

constexpr float kNoScore = -__builtin_inff();

}  // namespace ds_kernels
