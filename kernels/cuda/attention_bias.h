// What attention on CUDA devices does beside its own kernel: torch's attention, with a bias, on caches that have been
// appended to. No torch, no CUDA.
#pragma once

#include <ds_kernels/attention.h>

namespace ds_kernels::cuda {

// What the kernel holds of a query.
constexpr int64_t kMostHeadDim = 256;

// Whether the kernel for tensor cores can do it, on devices that have them.
inline bool fits_mma(const Attention& t, Dtype dtype) {
  const auto fits = [](const void* data, const HeadStrides& s, int64_t pack) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && s.batch % pack == 0 && s.head % pack == 0 && s.token % pack == 0;
  };
  const int64_t pack = t.key_scales ? 16 : 8;
  return dtype != Dtype::Float32 && (t.head_dim == 64 || t.head_dim == 128) && fits(t.query, t.query_strides, 8) &&
         fits(t.key_cache, t.key_cache_strides, pack) && fits(t.value_cache, t.value_cache_strides, pack);
}

// What torch's attention adds to scores, rows of `stride` elements of the query's dtype; and whether each query may attend
// to anything, 1 or 0. Batches and heads are 1 where all have the same.
struct AttentionBias {
  Attention attention;
  int64_t batches, heads, stride;
  void* data;
  float* sees;
};

// Makes zeros of the output of queries that may attend to nothing.
struct AttentionZeros : AttentionBias {};

// What a call to an int8 cache has to append to it before torch attends to that.
struct AttentionAppend {
  Attention attention;
};

// The bias that a call needs, of these sizes, without memory.
inline AttentionBias attention_bias(const Attention& a) {
  constexpr int64_t kAligned = 16;  // elements, as torch's kernels want rows to be apart
  const bool masked = a.mask_kind != Mask::None;
  return {a, masked && a.mask_strides[0] ? a.batch : 1, masked && a.mask_strides[1] ? a.heads : 1,
          (a.total + kAligned - 1) / kAligned * kAligned, nullptr, nullptr};
}

}  // namespace ds_kernels::cuda
