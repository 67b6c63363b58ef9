// What the kernels of attention share: how they read and extend caches, what a mask makes of a score, and how positions are
// cut into parts.
#pragma once

#include <ds_kernels/attention.h>

#include "attention_bias.h"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarpThreads;
constexpr int kSlice = 8;  // elements of a head that a thread has
constexpr int kFinishThreads = 256;  // at least as many as a head has elements
static_assert(kFinishThreads >= kMostHeadDim);
constexpr float kNever = -__builtin_huge_valf();

// e^(a - top), where nothing was seen yet 0. A NaN that was seen is in the sum, and stays one if it is multiplied by 0.
__device__ __forceinline__ float relative(float a, float top) { return a == kNever ? 0.f : __expf(a - top); }

// ---- keys and values -----------------------------------------------------------------------------------------------

// Elements [begin, begin + kSlice) of a head; 0 beyond its end.
template <bool packed, class Element>
__device__ __forceinline__ void load_slice(const Element* head, int begin, int head_dim, float (&x)[kSlice]) {
  if constexpr (packed) {
    load<kSlice>(head + begin, x);
  } else {
#pragma unroll
    for (int j = 0; j < kSlice; ++j) x[j] = begin + j < head_dim ? widen(head[begin + j]) : 0.f;
  }
}
template <class Element>
__device__ __forceinline__ void store_slice(Element* head, int begin, int head_dim, const float (&x)[kSlice]) {
#pragma unroll
  for (int j = 0; j < kSlice; ++j) {
    if (begin + j < head_dim) narrow(x[j], head[begin + j]);
  }
}

// What a thread has of a key or a value: elements, or levels and what a step of them is worth.
struct Slice {
  float x[kSlice] = {}, step = 1;
};

// Rounds a row of which `lanes` neighbouring threads have a slice each, as an int8 cache holds it. All threads of a warp
// must call it.
__device__ __forceinline__ void quantize(Slice& slice, int lanes) {
  uint32_t largest = 0;  // numbers without their sign are in the order of their bits, infinity and NaN beyond all others
#pragma unroll
  for (int j = 0; j < kSlice; ++j) largest = Larger::combine(largest, __float_as_uint(slice.x[j]) & 0x7fffffffu);
  for (int mask = lanes / 2; mask > 0; mask /= 2) largest = Larger::combine(largest, of_other_lane(largest, mask));
  const Quantization q = row_quantization(__uint_as_float(largest));
#pragma unroll
  for (int j = 0; j < kSlice; ++j) slice.x[j] = quantized(slice.x[j], q);
  slice.step = __uint_as_float(largest) / 127;
}

// The keys or the values of a head, as the thread sees them that has the slices from `begin` on: those in the cache, of
// the query's dtype or int8 with a step for each, and new ones.
template <class Element, class Cached>
struct Rows {
  static constexpr bool kQuantized = std::is_same_v<Cached, int8_t>;

  Cached* cache;
  float* steps;
  const Element* added;
  int64_t cache_stride, steps_stride, added_stride;
  int begin, head_dim;

  __device__ __forceinline__ Rows(void* cache, const HeadStrides& of_cache, float* steps, const HeadStrides& of_steps,
                                  const void* added, const HeadStrides& of_added, int64_t batch, int64_t head, int begin,
                                  int64_t head_dim)
      : cache(static_cast<Cached*>(cache) + of_cache.at(batch, head, 0)),
        steps(kQuantized ? steps + of_steps.at(batch, head, 0) : nullptr),
        added(static_cast<const Element*>(added) + of_added.at(batch, head, 0)),
        cache_stride(of_cache.token),
        steps_stride(of_steps.token),
        added_stride(of_added.token),
        begin(begin),
        head_dim(static_cast<int>(head_dim)) {}

  template <bool packed>
  __device__ __forceinline__ void load_cached(int64_t position, Slice& slice) const {
    load_slice<packed>(cache + position * cache_stride, begin, head_dim, slice.x);
    if constexpr (kQuantized) slice.step = steps[position * steps_stride];
  }
  __device__ __forceinline__ void load_added(int64_t token, Slice& slice) const {
    load_slice<false>(added + token * added_stride, begin, head_dim, slice.x);
  }
  __device__ __forceinline__ void append(int64_t position, const Slice& slice) const {
    store_slice(cache + position * cache_stride, begin, head_dim, slice.x);
    if constexpr (kQuantized) {
      if (begin == 0) steps[position * steps_stride] = slice.step;
    }
  }

  // To an int8 cache. All threads of a warp must call it.
  __device__ __forceinline__ void append_rounded(int64_t position, int64_t token, int lanes, bool has_slice) const {
    Slice slice;
    if (has_slice) load_added(token, slice);
    quantize(slice, lanes);
    if (has_slice) append(position, slice);
  }
};

template <class Element, class Cached>
__device__ __forceinline__ Rows<Element, Cached> keys_of(const Attention& t, int64_t batch, int64_t head, int begin) {
  return {t.key_cache, t.key_cache_strides, t.key_scales, t.key_scales_strides, t.key, t.key_strides,
          batch,       head,                begin,        t.head_dim};
}
template <class Element, class Cached>
__device__ __forceinline__ Rows<Element, Cached> values_of(const Attention& t, int64_t batch, int64_t head, int begin) {
  return {t.value_cache, t.value_cache_strides, t.value_scales, t.value_scales_strides, t.value, t.value_strides,
          batch,         head,                  begin,          t.head_dim};
}

// Appends the new ones of positions [begin, end) to int8 caches: a row for each `lanes` threads of the block, all of which
// must call it.
template <class Rows>
__device__ __forceinline__ void append_rounded(const Rows& keys, const Rows& values, int64_t past, int64_t begin,
                                               int64_t end, int lanes) {
  const int row = static_cast<int>(threadIdx.x) / lanes;
  for (int64_t first = begin > past ? begin : past; first < end; first += kThreads / lanes) {
    const bool has_slice = first + row < end && keys.begin < keys.head_dim;
    keys.append_rounded(first + row, first + row - past, lanes, has_slice);
    values.append_rounded(first + row, first + row - past, lanes, has_slice);
  }
}

// ---- scores ------------------------------------------------------------------------------------------------------

// A score with what is added to it; -inf where the query may not attend, whatever the score.
template <class Element>
__device__ __forceinline__ float biased(const Attention& t, float score, int64_t batch, int64_t head, int64_t token,
                                        int64_t position) {
  const int64_t own = t.total - t.tokens + token;
  if ((t.causal && position > own) || (t.window && position <= own - t.window)) return kNever;
  if (t.alibi) score += t.alibi[head] * static_cast<float>(position);
  const int64_t at = batch * t.mask_strides[0] + head * t.mask_strides[1] + token * t.mask_strides[2] +
                     position * t.mask_strides[3];
  switch (t.mask_kind) {
    case Mask::Bool: return static_cast<const bool*>(t.mask)[at] ? score : kNever;
    case Mask::Float: return score + static_cast<const float*>(t.mask)[at];
    case Mask::Element: return score + widen(static_cast<const Element*>(t.mask)[at]);
    default: return score;
  }
}

// ---- parts -------------------------------------------------------------------------------------------------------

// How positions are shared: parts of so many each. Made on the host: its divisions of 64 bits would take each thread as
// long as some of the positions do.
struct Parts {
  int64_t size, count;

  explicit Parts(const Attention& t) {
    constexpr int64_t kLeast = 64;                         // positions of a part
    const int64_t blocks = t.key_scales ? 768 : 1024;  // that keep a large GPU busy
    const int64_t rows = t.batch * t.kv_heads, wanted = (blocks + rows - 1) / rows;
    const int64_t most = (t.total + kLeast - 1) / kLeast, parts = wanted < most ? wanted : most;
    const int64_t each = parts > 0 ? (t.total + parts - 1) / parts : 0;
    size = (each + kLeast - 1) / kLeast * kLeast;
    count = size > 0 ? (t.total + size - 1) / size : 1;
  }
};

// Where the numbers of one query and part lie: top, sum, result.
__device__ __forceinline__ float* partial_of(const Attention& t, float* partial, const Parts& parts, int64_t row,
                                             int64_t part, int64_t query) {
  const int64_t queries = t.group() * t.tokens;
  return partial + ((row * parts.count + part) * queries + query) * (2 + t.head_dim);
}

// Merges what the warps of a block know of `rows` queries, each top, sum and result, and stores it as `partial_of` says.
template <int tile, int width>
__device__ __forceinline__ void store_merged(const float (&known)[kWarps][tile][width], int rows, int head_dim, float* to) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * head_dim; i += kThreads) {
    const int query = i / head_dim, element = i - query * head_dim;
    float top = kNever, sum = 0, result = 0;
    for (int w = 0; w < kWarps; ++w) top = Maximum::combine(known[w][query][0], top);
    for (int w = 0; w < kWarps; ++w) {
      const float weight = relative(known[w][query][0], top);
      sum += known[w][query][1] * weight;
      result += known[w][query][2 + element] * weight;
    }
    float* own = to + query * (2 + head_dim);
    if (element == 0) own[0] = top, own[1] = sum;
    own[2 + element] = result;
  }
}

}  // namespace
}  // namespace ds_kernels::cuda
