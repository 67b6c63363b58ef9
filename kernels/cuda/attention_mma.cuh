// Attention of a few queries by tensor cores, for heads of 64 and 128 elements of 16 bits, over caches of these or int8.
//
// A warp multiplies sixteen queries of a head of keys with sixteen positions, and their weights with the values. What a
// product sums over has no order, so each thread has neighbouring elements of a key, and takes of each query what lies
// at the same places: keys and values go from memory to registers, 16 bytes at a time. Weights are split in two numbers
// of 16 bits, which together have as many digits as the sums need.
#pragma once

#include "attention.cuh"
#include "mma.cuh"
#include "pairs.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr int kTile = 16;  // queries, and positions, that a warp multiplies at a time

#ifndef __HIPCC__

// ---- pairs of elements -------------------------------------------------------------------------------------------

// Elements 2 i and 2 i + 1 of those that words hold.
template <class Element, class Cached, int count>
__device__ __forceinline__ uint32_t pair_of(const uint32_t (&words)[count], int i) {
  if constexpr (sizeof(Cached) == 2) return words[i];
  return pair_of_levels<Element>(__byte_perm(words[i / 2], 0, i % 2 ? 0x4342 : 0x4140));
}

// Element i of two rows.
template <class Element, class Cached, int count>
__device__ __forceinline__ uint32_t pair_of(const uint32_t (&first)[count], const uint32_t (&second)[count], int i) {
  if constexpr (sizeof(Cached) == 2) return __byte_perm(first[i / 2], second[i / 2], i % 2 ? 0x7632 : 0x5410);
  return pair_of_levels<Element>(__byte_perm(first[i / 4], second[i / 4], 0x0400 + 0x0101 * (i % 4)));
}

// x = high + low, within some 2^-16 of it if elements are bfloat16.
template <class Element>
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
  high = narrow_two<Element>(x, y);
  float of_x, of_y;
  widen_two<Element>(high, of_x, of_y);
  low = narrow_two<Element>(x - of_x, y - of_y);
}

// ---- a warp's part of a head -------------------------------------------------------------------------------------

// What the threads of a warp have of queries, keys and values. A thread is g = lane / 4, q = lane % 4, as for `mma`.
template <class Element, class Cached, int head_dim>
struct Fragments {
  using Weight = std::conditional_t<sizeof(Cached) == 2, Element, BFloat16>;  // small steps are no Float16

  static constexpr int kHeld = 16 / sizeof(Cached);       // elements of a key that a thread has together
  static constexpr int kChunks = head_dim / (4 * kHeld);  // so many times
  static constexpr int kSteps = kHeld / 4;                // products of a chunk
  static constexpr int kColumns = head_dim / 8;           // of a value that a thread has
  static constexpr int kValueWords = kColumns * sizeof(Cached) / 4;
  static constexpr int kRun = kValueWords < 4 ? kValueWords : 4;  // words of a value that lie together

  // All warps of a block have the same queries, in shared memory: they take a quarter of the registers otherwise.
  struct Query {
    uint4 steps[kChunks * kSteps][kWarpThreads];
  };

  uint32_t key[2][kChunks][4];
  uint32_t value[4][kValueWords];
  float key_step[2][2], value_step[2][2];  // of int8 ones: of the positions whose scores the thread has

  // Where column e of a value is whose thread has this g.
  static __device__ __forceinline__ int column_of(int e, int g) {
    constexpr int kOfRun = kRun * 4 / sizeof(Cached);
    return e / kOfRun * (8 * kOfRun) + g * kOfRun + e % kOfRun;
  }

  // What a thread has of two queries, g and g + 8; null for none.
  static __device__ __forceinline__ void load_queries(const Element* first, const Element* second, int lane, Query& to) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint32_t words[2][kHeld / 2] = {};
      const int place = (c * 4 + lane % 4) * kHeld;
      if (first) load_words(reinterpret_cast<const uint32_t*>(first + place), words[0]);
      if (second) load_words(reinterpret_cast<const uint32_t*>(second + place), words[1]);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        to.steps[c * kSteps + s][lane] = {words[0][2 * s], words[1][2 * s], words[0][2 * s + 1], words[1][2 * s + 1]};
      }
    }
  }

  __device__ __forceinline__ void load_key(int i, const Cached* row, int q) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (row) {
        load_words(reinterpret_cast<const uint32_t*>(row + (c * 4 + q) * kHeld), key[i][c]);
      } else {
#pragma unroll
        for (int w = 0; w < 4; ++w) key[i][c][w] = 0;
      }
    }
  }

  __device__ __forceinline__ void load_value(int i, const Cached* row, int g) {
#pragma unroll
    for (int w = 0; w < kValueWords; w += kRun) {
      uint32_t words[kRun] = {};
      constexpr int kOfWord = 4 / sizeof(Cached);
      if (row) load_words(reinterpret_cast<const uint32_t*>(row + column_of(w * kOfWord, g)), words);
#pragma unroll
      for (int j = 0; j < kRun; ++j) value[i][w + j] = words[j];
    }
  }

  // Of positions begin + place, the one after it, and the eighth after each; 0 from place `size` on.
  static __device__ __forceinline__ void load_steps(const float* steps, int64_t stride, int64_t begin, int place, int size,
                                                    float (&to)[2][2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int own = place + 8 * i + j;
        to[i][j] = own < size ? steps[(begin + own) * stride] : 0.f;
      }
    }
  }

  // Adds the queries' products with keys 8 i to 8 i + 7.
  __device__ __forceinline__ void add_scores(int i, const Query& queries, int lane, float (&scores)[4]) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint4 four = queries.steps[c * kSteps + s][lane];
        const uint32_t query[4] = {four.x, four.y, four.z, four.w};
        const uint32_t keys[2] = {pair_of<Element, Cached>(key[i][c], 2 * s), pair_of<Element, Cached>(key[i][c], 2 * s + 1)};
        mma(query, keys, scores, Element{});
      }
    }
  }

  // Adds the values times their weights.
  __device__ __forceinline__ void add_values(const float (&weights)[2][4], float (&result)[kColumns][4]) const {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      split<Weight>(weights[i][0], weights[i][1], high[2 * i], low[2 * i]);
      split<Weight>(weights[i][2], weights[i][3], high[2 * i + 1], low[2 * i + 1]);
    }
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      const uint32_t values[2] = {pair_of<Weight, Cached>(value[0], value[1], e),
                                  pair_of<Weight, Cached>(value[2], value[3], e)};
      mma(high, values, result[e], Weight{});
      mma(low, values, result[e], Weight{});
    }
  }
};

// What two queries know, of which a thread has some columns: rows g and g + 8.
template <int columns>
struct RunningPair {
  float top[2] = {kNever, kNever}, sum[2] = {}, result[columns][4] = {};

  // Turns scores into weights relative to the largest so far.
  __device__ __forceinline__ void weigh(float (&scores)[2][4]) {
    float faded[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = top[r];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        largest = Maximum::combine(scores[i][2 * r], largest);
        largest = Maximum::combine(scores[i][2 * r + 1], largest);
      }
      for (int mask = 1; mask < 4; mask *= 2) largest = Maximum::combine(of_other_lane(largest, mask), largest);
      faded[r] = relative(top[r], largest);
      top[r] = largest;
      sum[r] *= faded[r];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 2 * r; j < 2 * r + 2; ++j) {
          scores[i][j] = relative(scores[i][j], largest);
          sum[r] += scores[i][j];
        }
      }
    }
    if (faded[0] != 1.f || faded[1] != 1.f) {
#pragma unroll
      for (int e = 0; e < columns; ++e) {
#pragma unroll
        for (int j = 0; j < 4; ++j) result[e][j] *= faded[j / 2];
      }
    }
    __syncwarp();  // an `mma` follows, which all threads of a warp must do together
  }
};

// ---- the kernel --------------------------------------------------------------------------------------------------

// Appends the new ones of positions [begin, end) to the caches. All threads of a block must call it.
template <class Element, class Cached, int head_dim>
__device__ __forceinline__ void append_to_caches(const Attention& t, int64_t batch, int64_t kv_head, int64_t begin,
                                                 int64_t end) {
  constexpr int kShares = head_dim / kSlice, kTogether = kThreads / kShares;
  const int thread = static_cast<int>(threadIdx.x), slice = thread % kShares * kSlice;
  const auto keys = keys_of<Element, Cached>(t, batch, kv_head, slice);
  const auto values = values_of<Element, Cached>(t, batch, kv_head, slice);
  if constexpr (sizeof(Cached) == 1) {
    append_rounded(keys, values, t.past, begin, end, kShares);
  } else {
    for (int64_t position = (begin > t.past ? begin : t.past) + thread / kShares; position < end; position += kTogether) {
      Slice key, value;
      keys.load_added(position - t.past, key);
      values.load_added(position - t.past, value);
      keys.append(position, key);
      values.append(position, value);
    }
  }
  __syncthreads();  // from here on all are in the caches
}

// What masks, slopes and windows make of scores: of queries `query` and the eighth after it, of positions from `position`
// on, in the places that `mma` gives them.
template <class Element>
__device__ __forceinline__ void add_bias(const Attention& t, int64_t batch, int64_t kv_head, int query, int64_t position,
                                         int64_t end, float (&scores)[2][4]) {
  const auto tokens = static_cast<unsigned>(t.tokens);
  const int queries = static_cast<int>(t.group() * t.tokens);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int own = query + 8 * (i / 2 % 2);
    const int64_t at = position + 8 * (i / 4) + i % 2;
    if (own >= queries || at >= end) continue;
    const int64_t head = kv_head * t.group() + static_cast<unsigned>(own) / tokens;
    float& score = scores[i / 4][i % 4];
    score = biased<Element>(t, score, batch, head, static_cast<unsigned>(own) % tokens, at);
  }
}

template <class Element, class Cached, int head_dim>
__global__ void __launch_bounds__(kThreads, 3) attend_mma_kernel(const Attention t, const Parts parts, float* partial) {
  if constexpr (kCompilesMma) {
    using Held = Fragments<Element, Cached, head_dim>;
    constexpr bool kQuantized = sizeof(Cached) == 1;
    __shared__ float known[kWarps][kTile][2 + head_dim];
    __shared__ typename Held::Query query_tile;
    const auto count = static_cast<unsigned>(parts.count), tokens = static_cast<unsigned>(t.tokens);
    const int64_t row = blockIdx.x / count, part = blockIdx.x % count;
    const int64_t batch = row / t.kv_heads, kv_head = row - batch * t.kv_heads, group = t.group();
    const int64_t begin = part * parts.size, end = begin + parts.size < t.total ? begin + parts.size : t.total;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
    const auto size = static_cast<int>(end - begin);
    const int g = lane / 4, q = lane % 4, queries = static_cast<int>(group) * static_cast<int>(tokens);
    if (end > t.past) append_to_caches<Element, Cached, head_dim>(t, batch, kv_head, begin, end);

    const auto* keys = static_cast<const Cached*>(t.key_cache) + t.key_cache_strides.at(batch, kv_head, 0);
    const auto* values = static_cast<const Cached*>(t.value_cache) + t.value_cache_strides.at(batch, kv_head, 0);
    const float *key_steps = nullptr, *value_steps = nullptr;
    if constexpr (kQuantized) {
      key_steps = t.key_scales + t.key_scales_strides.at(batch, kv_head, 0);
      value_steps = t.value_scales + t.value_scales_strides.at(batch, kv_head, 0);
    }
    // One token attends to all that is there: nothing is asked for each position.
    const bool has_bias = t.mask_kind != Mask::None || t.alibi || t.window || (t.causal && tokens > 1);
    for (int first = 0; first < queries; first += kTile) {
      // Int8 keys are loaded once those before them have been multiplied, and the values likewise: in the same registers,
      // while the other half of the work goes on. In 16 bits registers spill then: 1.15 times as long on an H200.
      Held held;
      const auto load_keys = [&](int place) {
        const Cached* key = keys + (begin + place + g) * t.key_cache_strides.token;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          held.load_key(i, place + 8 * i + g < size ? key + 8 * i * t.key_cache_strides.token : nullptr, q);
        }
        if constexpr (kQuantized) held.load_steps(key_steps, t.key_scales_strides.token, begin, place + 2 * q, size, held.key_step);
      };
      const auto load_values = [&](int place) {
        const Cached* value = values + (begin + place + 2 * q) * t.value_cache_strides.token;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 8 * (i / 2) + i % 2;
          held.load_value(i, place + row + 2 * q < size ? value + row * t.value_cache_strides.token : nullptr, g);
        }
        if constexpr (kQuantized) {
          held.load_steps(value_steps, t.value_scales_strides.token, begin, place + 2 * q, size, held.value_step);
        }
      };
      if constexpr (kQuantized) load_keys(warp * kTile), load_values(warp * kTile);
      if (first > 0) __syncthreads();  // the queries before these have been read
      if (warp == 0) {
        const Element* query[2] = {};
        for (int i = 0; i < 2; ++i) {
          const auto index = static_cast<unsigned>(first + g + 8 * i);
          if (static_cast<int>(index) >= queries) continue;
          query[i] = static_cast<const Element*>(t.query) +
                     t.query_strides.at(batch, kv_head * group + index / tokens, index % tokens);
        }
        Held::load_queries(query[0], query[1], lane, query_tile);
      }
      __syncthreads();
      RunningPair<Held::kColumns> running;
      for (int place = warp * kTile; place < size; place += kWarps * kTile) {
        if constexpr (!kQuantized) load_keys(place), load_values(place);
        float scores[2][4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          held.add_scores(i, query_tile, lane, scores[i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float scale = t.scale;
            if constexpr (kQuantized) scale *= held.key_step[i][j % 2];
            scores[i][j] = place + 8 * i + 2 * q + j % 2 < size ? scores[i][j] * scale : kNever;
          }
        }
        if constexpr (kQuantized) load_keys(place + kWarps * kTile);
        if (has_bias) add_bias<Element>(t, batch, kv_head, first + g, begin + place + 2 * q, end, scores);
        running.weigh(scores);
        if constexpr (kQuantized) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) scores[i][j] *= held.value_step[i][j % 2];
          }
        }
        held.add_values(scores, running.result);
        if constexpr (kQuantized) load_values(place + kWarps * kTile);
      }
      __syncthreads();  // the tile before this one has been read
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        for (int mask = 1; mask < 4; mask *= 2) running.sum[r] += of_other_lane(running.sum[r], mask);
        if (first + g + 8 * r >= queries) continue;
        float* to = known[warp][g + 8 * r];
        if (q == 0) to[0] = running.top[r], to[1] = running.sum[r];
#pragma unroll
        for (int e = 0; e < Held::kColumns; ++e) {
#pragma unroll
          for (int j = 0; j < 2; ++j) to[2 + Held::column_of(e, 2 * q + j)] = running.result[e][2 * r + j];
        }
      }
      __syncthreads();
      const int rows = queries - first < kTile ? queries - first : kTile;
      store_merged(known, rows, head_dim, partial_of(t, partial, parts, row, part, first));
    }
  }
}

#endif

// ---- on the host -------------------------------------------------------------------------------------------------

// Calls `with(kernel)` with the kernel for a call that fits.
template <class Element, class With>
void with_mma_kernel(const Attention& t, const With& with) {
#ifndef __HIPCC__
  if constexpr (sizeof(Element) == 2) {
    if (t.head_dim == 64) {
      return t.key_scales ? with(attend_mma_kernel<Element, int8_t, 64>) : with(attend_mma_kernel<Element, Element, 64>);
    }
    return t.key_scales ? with(attend_mma_kernel<Element, int8_t, 128>) : with(attend_mma_kernel<Element, Element, 128>);
  }
#endif
  (void)t, (void)with;
}

}  // namespace
}  // namespace ds_kernels::cuda
