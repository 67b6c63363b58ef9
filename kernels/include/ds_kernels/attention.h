// Attention over a cache: what the op asks of a device, and how CPUs attend with a few queries to a run of keys and
// values, by blocks with a running maximum. No torch, no operating system.
//
//   scores = q k + bias        weights = e^(scores - max)        result = sum(weights v) / sum(weights)
//
// The running maximum is that of Milakov and Gimelshein 2018; parts of a row are merged as Dao et al. 2023 do.
#pragma once

#include <type_traits>

#include <ds_kernels/quantizer.h>

namespace ds_kernels {

// ---- what is asked of a device -----------------------------------------------------------------------------------

// What a mask has for each position: whether it counts, or what is added to its score, a float or of the query's dtype.
enum class Mask : int { None, Bool, Float, Element };

// Elements from one batch row, head and token to the next; those of one head lie together.
struct HeadStrides {
  int64_t batch, head, token;
  DS_KERNELS_INLINE int64_t at(int64_t b, int64_t h, int64_t t) const { return b * batch + h * head + t * token; }
};

// Attention of `tokens` queries of each head, the last ones of `total` positions, of which the cache held `past`. Keys
// and values of the others are appended to it. Int8 caches have a scale for each position of a head.
struct Attention {
  int64_t batch, heads, kv_heads, tokens, past, total, head_dim;
  const void *query, *key, *value;
  HeadStrides query_strides, key_strides, value_strides;
  void *key_cache, *value_cache;
  HeadStrides key_cache_strides, value_cache_strides;
  float *key_scales, *value_scales;  // of int8 caches; null for those of the query's dtype
  HeadStrides key_scales_strides, value_scales_strides;
  void* output;  // [batch, tokens, heads, head_dim]
  float scale;
  Mask mask_kind;
  const void* mask;
  int64_t mask_strides[4];
  const float* alibi;  // [heads], or null
  int64_t window;      // 0 for all positions
  bool causal;

  // Heads that share keys and values.
  DS_KERNELS_INLINE int64_t group() const { return heads / kv_heads; }
};

inline namespace DS_KERNELS_CPU_LEVEL {

// How a row of keys or values becomes int8: `largest` is that of its magnitudes, and its scale is 1 / 127 of it. Where
// a number is not finite, nor is the scale, and all levels are 0: the row stands for NaN.
DS_KERNELS_INLINE Quantization row_quantization(float largest) {
  return {largest == 0 ? 1.f : 127 / largest, 0, -127, 127};
}

}  // namespace DS_KERNELS_CPU_LEVEL

#ifndef DS_KERNELS_GPU_COMPILER

// ---- on CPUs -----------------------------------------------------------------------------------------------------

inline namespace DS_KERNELS_CPU_LEVEL {

// Positions whose scores wait together.
constexpr int64_t kPositions = 128;

constexpr float kNever = -__builtin_inff();

// How far ahead keys and values are fetched. On Zen 5 a step of one token, whose caches are in memory, takes 0.5 to 0.7 times
// as long as with 256 bytes.
inline uintptr_t cache_prefetch_bytes() {
  static const uintptr_t bytes = is_zen5_or_later() ? 8192 : stream_prefetch_bytes();
  return bytes;
}

// What a query knows after some positions: `sum` and `result` are relative to e^top.
struct Running {
  float top, sum;
  float* result;  // [head_dim]
};

// e^(a - top), where nothing was seen yet 0.
DS_KERNELS_INLINE float relative(float a, float top) { return a == kNever ? 0.f : exponential(a - top); }

// Merges what another query's part, relative to its own top, has seen.
inline void merge(Running& into, const Running& other, int64_t head_dim) {
  const float top = into.top > other.top ? into.top : other.top;
  const float a = relative(into.top, top), b = relative(other.top, top);
  into.sum = into.sum * a + other.sum * b;
  into.top = top;
  for_each_vector(head_dim, [&](int64_t i, auto memory) {
    memory.store(into.result + i, memory.load(into.result + i) * a + memory.load(other.result + i) * b);
  });
}

// Keys or values of one head, a row for each position, and those that are read after them: the caches of a step lie in
// memory, in runs too short for what processors fetch by themselves.
template <class Element>
struct CacheRows {
  const Element* first;
  int64_t stride, count;
  const Element* next;
  int64_t next_stride, ahead;

  CacheRows(const Element* first, int64_t stride, int64_t count, const Element* next, int64_t next_stride, int64_t head_dim)
      : first(first), stride(stride), count(count), next(next), next_stride(next_stride) {
    const int64_t row = head_dim * static_cast<int64_t>(sizeof(Element));
    const int64_t rows = static_cast<int64_t>(cache_prefetch_bytes()) / (row ? row : 1);
    ahead = rows < 1 ? 1 : rows < count ? rows : count;
  }

  DS_KERNELS_INLINE const Element* at(int64_t p) const { return first + p * stride; }

  // Fetches `columns` elements, from the i-th on, of what is read so far behind row p.
  DS_KERNELS_INLINE void fetch(int64_t p, int64_t i, int64_t columns) const {
    const int64_t later = p + ahead;
    const Element* row = later < count ? at(later) : next + (later - count) * next_stride;
    for (int64_t k = i; k < i + columns; k += 64 / static_cast<int64_t>(sizeof(Element))) prefetch(row + k, 0);
  }
};

// Multiplies by numbers that lie `stride` apart.
inline void multiply(float* numbers, const float* by, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) numbers[i] *= by[i * stride];
}

// Adds the products of vectors of queries and keys: [query][key].
template <int queries, int keys, class Memory, class Element>
DS_KERNELS_INLINE void add_scores(Floats* sums, Memory memory, const float* const (&query)[queries],
                                  const Element* key, int64_t stride, int64_t i) {
  Floats values[queries];
  DS_KERNELS_UNROLL
  for (int q = 0; q < queries; ++q) values[q] = memory.load(query[q] + i);
  DS_KERNELS_UNROLL
  for (int k = 0; k < keys; ++k) {
    const Floats wide = memory.load(key + k * stride + i);
    DS_KERNELS_UNROLL
    for (int q = 0; q < queries; ++q) sums[q * keys + k] += wide * values[q];
  }
}

// scores[q][p] = query q . key p, for queries of one head of keys: each key is read, and made floats, once.
template <int queries, class Element>
DS_KERNELS_INLINE void score(const float* const (&query)[queries], const CacheRows<Element>& keys, int64_t head_dim,
                             float* const (&scores)[queries]) {
  const int64_t stride = keys.stride, count = keys.count;
  const auto add_products = [&](Floats* sums, auto number, int64_t p) {
    constexpr int kKeys = decltype(number)::value;
    const Element* key = keys.at(p);
    for (int k = 0; k < kKeys; ++k) keys.fetch(p + k, 0, head_dim);
    int64_t i = 0;
    for (; i + kLanes <= head_dim; i += kLanes) add_scores<queries, kKeys>(sums, PlainVector{}, query, key, stride, i);
    if (i < head_dim) add_scores<queries, kKeys>(sums, PartVector{head_dim - i}, query, key, stride, i);
  };
  // Several keys at a time so that a query's vector is loaded once for them; a single query meets one row after the other.
  constexpr int kKeys = kLanes / queries, kAtOnce = queries == 1 ? 1 : kKeys;
  int64_t p = 0;
  for (; p + kKeys <= count; p += kKeys) {
    Floats sums[kLanes] = {};
    DS_KERNELS_UNROLL
    for (int k = 0; k < kKeys; k += kAtOnce) add_products(sums + k, std::integral_constant<int, kAtOnce>{}, p + k);
    float lanes[kLanes];
    store_bits(lanes, sums_of(sums));
    for (int q = 0; q < queries; ++q) __builtin_memcpy(scores[q] + p, lanes + q * kKeys, kKeys * sizeof(float));
  }
  for (; p < count; ++p) {
    Floats sums[queries] = {};
    add_products(sums, std::integral_constant<int, 1>{}, p);
    for (int q = 0; q < queries; ++q) scores[q][p] = sum_of(sums[q]);
  }
}

// The largest of `count` scores and `top`. NaNs do not count.
inline float largest(const float* scores, int64_t count, float top) {
  Floats tops = Floats{} + top;
  int64_t p = 0;
  for (; p + kLanes <= count; p += kLanes) tops = maximum(load(scores + p), tops);
  top = maximum_of(tops);
  for (; p < count; ++p) top = maximum(scores[p], top);
  return top;
}

inline bool has_nan(const float* scores, int64_t count) {
  bool found = false;
  for (int64_t p = 0; p < count; ++p) found |= scores[p] != scores[p];
  return found;
}

// Turns `count` scores into weights e^(score - top), with a top that knows them; gives by how much less what was summed
// before now weighs.
inline float weigh(Running& running, float* scores, int64_t count) {
  const float top = largest(scores, count, running.top);
  if (top == kNever && !has_nan(scores, count)) {
    for (int64_t p = 0; p < count; ++p) scores[p] = 0;
    return 1;
  }
  const float faded = relative(running.top, top);
  Floats sums{};
  for_each_vector(count, [&](int64_t p, auto memory) {
    memory.store(scores + p, exponential(memory.load(scores + p) - top));
    sums += memory.load(scores + p);  // lanes beyond the last score are loaded as zeros
  });
  running.top = top;
  running.sum = running.sum * faded + sum_of(sums);
  return faded;
}

// For some queries of one head of values; [query] each.
template <int queries>
struct Weighted {
  float* result[queries];
  float faded[queries];
  const float* weights[queries];  // [query][position]
};

// `vectors` vectors of the results, from element i on.
template <int vectors, int queries, class Memory, class Element>
DS_KERNELS_INLINE void add_values(const Weighted<queries>& by, Memory memory, const CacheRows<Element>& values, int64_t i) {
  Floats sums[queries][vectors];
  for (int q = 0; q < queries; ++q) {
    for (int k = 0; k < vectors; ++k) sums[q][k] = memory.load(by.result[q] + i + k * kLanes) * by.faded[q];
  }
  for (int64_t p = 0; p < values.count; ++p) {
    const Element* row = values.at(p) + i;
    values.fetch(p, i, vectors * kLanes);
    Floats wide[vectors];
    DS_KERNELS_UNROLL
    for (int k = 0; k < vectors; ++k) wide[k] = memory.load(row + k * kLanes);
    DS_KERNELS_UNROLL
    for (int q = 0; q < queries; ++q) {
      DS_KERNELS_UNROLL
      for (int k = 0; k < vectors; ++k) sums[q][k] += by.weights[q][p] * wide[k];
    }
  }
  for (int q = 0; q < queries; ++q) {
    for (int k = 0; k < vectors; ++k) memory.store(by.result[q] + i + k * kLanes, sums[q][k]);
  }
}

// result <- faded result + sum over positions of weight * value
template <int queries, class Element>
DS_KERNELS_INLINE void add_values(const Weighted<queries>& by, const CacheRows<Element>& values, int64_t head_dim) {
  constexpr int kVectors = queries == 4 && kLanes < 16 ? 2 : 4;  // the sums shall stay in registers
  int64_t i = 0;
  for (; i + kVectors * kLanes <= head_dim; i += kVectors * kLanes) {
    add_values<kVectors>(by, PlainVector{}, values, i);
  }
  for (; i + kLanes <= head_dim; i += kLanes) add_values<1>(by, PlainVector{}, values, i);
  if (i < head_dim) add_values<1>(by, PartVector{head_dim - i}, values, i);
}

}  // namespace DS_KERNELS_CPU_LEVEL

#endif  // not DS_KERNELS_GPU_COMPILER

}  // namespace ds_kernels
