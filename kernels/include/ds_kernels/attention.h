// Attention over a cache: what the op asks of a device, and how CPUs attend with a few queries to a run of keys and
// values, by blocks with a running maximum. No torch, no operating system.
//
//   scores = q k + bias        weights = e^(scores - max)        result = sum(weights v) / sum(weights)
//
// The running maximum is that of Milakov and Gimelshein 2018; parts of a row are merged as Dao et al. 2023 do.
#pragma once

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

// Where the rows of one array lie that are read one after the other: up to `end`, and then `jump` bytes behind that.
struct RowsToRead {
  uintptr_t end;
  intptr_t jump;
  uintptr_t ahead;  // fetched so many bytes before they are read
};

// `next`: where the rows begin that are read after those up to `end`; null if there are none.
inline RowsToRead rows_to_read(const void* end, const void* next, uintptr_t ahead) {
  const auto at = reinterpret_cast<uintptr_t>(end);
  return {at, static_cast<intptr_t>(next ? reinterpret_cast<uintptr_t>(next) - at : 0 - ahead), ahead};
}

// Fetches what is read some time after a row: hardware prefetchers stop at every page, and at the end of a head. It may be
// beyond the array: an address, not a pointer.
template <class Element>
DS_KERNELS_INLINE void fetch_after(const Element* row, int64_t head_dim, const RowsToRead& rows) {
  uintptr_t at = reinterpret_cast<uintptr_t>(row) + rows.ahead;
  at += at < rows.end ? 0 : rows.jump;
  const uintptr_t bytes = head_dim * sizeof(Element);
  for (uintptr_t i = 0; i < bytes; i += 64) __builtin_prefetch(reinterpret_cast<const void*>(at + i));
}

// The products of a query and a key, for elements of any storage type, which remain to be added up.
template <class Element>
DS_KERNELS_INLINE Floats products(const float* query, const Element* key, int64_t head_dim) {
  Floats sum{}, other{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= head_dim; i += 2 * kLanes) {
    sum += load(query + i) * load(key + i);
    other += load(query + i + kLanes) * load(key + i + kLanes);
  }
  for_each_vector(head_dim - i, [&](int64_t k, auto memory) {
    sum += memory.load(query + i + k) * memory.load(key + i + k);
  });
  return sum + other;
}

// Multiplies by numbers that lie `stride` apart.
inline void multiply(float* numbers, const float* by, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) numbers[i] *= by[i * stride];
}

// scores[p] = query . key p
template <class Element>
DS_KERNELS_INLINE void score(const float* query, const Element* keys, int64_t stride, int64_t count, int64_t head_dim,
                             const RowsToRead& rows, float* scores) {
  const auto product = [&](int64_t p) {
    fetch_after(keys + p * stride, head_dim, rows);
    return products(query, keys + p * stride, head_dim);
  };
  int64_t p = 0;
  for (; p + kLanes <= count; p += kLanes) {
    Floats sums[kLanes];
    for (int k = 0; k < kLanes; ++k) sums[k] = product(p + k);
    store(scores + p, sums_of(sums));
  }
  for (; p < count; ++p) scores[p] = sum_of(product(p));
}

// Turns `count` scores into weights e^(score - top), with a top that knows them; gives by how much less what was summed
// before now weighs.
inline float weigh(Running& running, float* scores, int64_t count) {
  float top = running.top;
  bool broken = false;
  for (int64_t p = 0; p < count; ++p) {
    top = scores[p] > top ? scores[p] : top;
    broken |= scores[p] != scores[p];
  }
  if (top == kNever && !broken) {
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

// result <- faded result + sum over positions of weight * value
template <class Element>
DS_KERNELS_INLINE void add_values(float* result, float faded, const float* weights, int64_t count, const Element* values,
                                  int64_t stride, int64_t head_dim, const RowsToRead& rows) {
  constexpr int kTile = 4;
  int64_t i = 0;
  for (; i + kTile * kLanes <= head_dim; i += kTile * kLanes) {
    Floats sums[kTile];
    for (int k = 0; k < kTile; ++k) sums[k] = load(result + i + k * kLanes) * faded;
    for (int64_t p = 0; p < count; ++p) {
      fetch_after(values + p * stride + i, kTile * kLanes, rows);
      for (int k = 0; k < kTile; ++k) sums[k] += weights[p] * load(values + p * stride + i + k * kLanes);
    }
    for (int k = 0; k < kTile; ++k) store(result + i + k * kLanes, sums[k]);
  }
  for_each_vector(head_dim - i, [&](int64_t k, auto memory) {
    Floats sum = memory.load(result + i + k) * faded;
    for (int64_t p = 0; p < count; ++p) sum += weights[p] * memory.load(values + p * stride + i + k);
    memory.store(result + i + k, sum);
  });
}

}  // namespace DS_KERNELS_CPU_LEVEL

#endif  // not DS_KERNELS_GPU_COMPILER

}  // namespace ds_kernels
