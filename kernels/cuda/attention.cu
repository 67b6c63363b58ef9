// Attention of a few queries over a cache of keys and values, which may be int8. Positions are cut into parts, a block
// each for all queries of a head of keys; what the parts know is merged in one order (Dao et al. 2023), relative to the
// largest score of each (Milakov and Gimelshein 2018). How many parts there are depends on shapes alone: any GPU gives the
// same bits.

#include "attention.cuh"
#include "attention_mma.cuh"

namespace ds_kernels::cuda {
namespace {

// ---- what a query knows ------------------------------------------------------------------------------------------

// After some positions: `sum` and `result` are relative to e^top.
struct Running {
  float top = kNever, sum = 0, result[kSlice] = {};

  __device__ __forceinline__ void add(float score, const Slice& value) {
    const float now = score > top ? score : top, faded = relative(top, now), weight = relative(score, now);
    top = now;
    sum = sum * faded + weight;
    const float steps = weight * value.step;
#pragma unroll
    for (int j = 0; j < kSlice; ++j) result[j] = result[j] * faded + steps * value.x[j];
  }

  // Merges what the thread of another lane knows.
  __device__ __forceinline__ void merge_with_lane(int mask) {
    const float other_top = __shfl_xor_sync(kWholeWarp, top, mask), other_sum = __shfl_xor_sync(kWholeWarp, sum, mask);
    const float now = other_top > top ? other_top : top, mine = relative(top, now), its = relative(other_top, now);
    top = now;
    sum = sum * mine + other_sum * its;
#pragma unroll
    for (int j = 0; j < kSlice; ++j) {
      result[j] = result[j] * mine + __shfl_xor_sync(kWholeWarp, result[j], mask) * its;
    }
  }
};

// `lanes` threads share a head; queries are taken `tile` at a time.
template <class Element, class Cached, int tile, bool packed>
__global__ void __launch_bounds__(kThreads)
    attend_kernel(const Attention t, const Parts parts, float* partial, const int lanes) {
  __shared__ float known[kWarps][tile][2 + kMostHeadDim];
  constexpr int kAtOnce = tile == 1 ? 4 : tile <= 4 ? 2 : 1;  // positions whose loads are under way together
  const auto count = static_cast<unsigned>(parts.count), tokens = static_cast<unsigned>(t.tokens);
  const int64_t row = blockIdx.x / count, part = blockIdx.x % count;
  const int64_t batch = row / t.kv_heads, kv_head = row - batch * t.kv_heads, group = t.group();
  const int64_t begin = part * parts.size, end = begin + parts.size < t.total ? begin + parts.size : t.total;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int head_dim = static_cast<int>(t.head_dim), slice = thread % lanes * kSlice, together = kThreads / lanes;
  const bool has_slice = slice < head_dim;
  const auto keys = keys_of<Element, Cached>(t, batch, kv_head, slice);
  const auto values = values_of<Element, Cached>(t, batch, kv_head, slice);
  const int64_t queries = group * t.tokens;
  // One token attends to all that is there: nothing is asked for each position.
  const bool has_bias = t.mask_kind != Mask::None || t.alibi || t.window || (t.causal && tokens > 1);
  if constexpr (keys.kQuantized) {
    append_rounded(keys, values, t.past, begin, end, lanes);
    __syncthreads();  // from here on all are in the cache
  }
  for (int64_t first = 0; first < queries; first += tile) {
    float query[tile][kSlice] = {};
    Running running[tile];
#pragma unroll
    for (int q = 0; q < tile; ++q) {
      if (first + q >= queries || !has_slice) continue;
      const unsigned index = static_cast<unsigned>(first) + q;
      const int64_t head = kv_head * group + index / tokens, token = index % tokens;
      load_slice<false>(static_cast<const Element*>(t.query) + t.query_strides.at(batch, head, token), slice, head_dim,
                        query[q]);
    }
    // All threads take as many turns: they meet in shuffles.
    for (int64_t turn = begin + thread / lanes; turn - thread / lanes < end; turn += kAtOnce * together) {
      Slice key[kAtOnce], value[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t position = turn + i * together;
        if (position >= end || !has_slice) continue;
        if (keys.kQuantized || position < t.past) {
          keys.template load_cached<packed>(position, key[i]);
          values.template load_cached<packed>(position, value[i]);
        } else {
          keys.load_added(position - t.past, key[i]);
          values.load_added(position - t.past, value[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t position = turn + i * together;
        if (!keys.kQuantized && first == 0 && t.past <= position && position < end && has_slice) {
          keys.append(position, key[i]);
          values.append(position, value[i]);
        }
#pragma unroll
        for (int q = 0; q < tile; ++q) {
          float score = 0;
#pragma unroll
          for (int j = 0; j < kSlice; ++j) score += query[q][j] * key[i].x[j];
          for (int mask = lanes / 2; mask > 0; mask /= 2) score += __shfl_xor_sync(kWholeWarp, score, mask);
          if (first + q >= queries || position >= end) continue;
          score *= t.scale * key[i].step;
          if (has_bias) {
            const unsigned index = static_cast<unsigned>(first) + q;
            score = biased<Element>(t, score, batch, kv_head * group + index / tokens, index % tokens, position);
          }
          running[q].add(score, value[i]);
        }
      }
    }
    __syncthreads();  // the tile before this one has been read
#pragma unroll
    for (int q = 0; q < tile; ++q) {
      for (int mask = lanes; mask < kWarpThreads; mask *= 2) running[q].merge_with_lane(mask);
      if (lane >= lanes) continue;
      if (lane == 0) known[warp][q][0] = running[q].top, known[warp][q][1] = running[q].sum;
#pragma unroll
      for (int j = 0; j < kSlice; ++j) {
        if (slice + j < head_dim) known[warp][q][2 + slice + j] = running[q].result[j];
      }
    }
    __syncthreads();
    const int64_t left = queries - first;
    store_merged(known, left < tile ? static_cast<int>(left) : tile, head_dim,
                 partial_of(t, partial, parts, row, part, first));
  }
}

// Merges the parts of a query, a block for each. A warp has every so many parts, and adds up what they know of all
// elements of the head; every warp finds the largest score by itself. Those that have few parts, as most have, load them
// before they know it.
template <class Element>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const Attention t, const Parts parts, float* partial) {
  constexpr int kFinishWarps = kFinishThreads / kWarpThreads, kOfLane = kMostHeadDim / kWarpThreads, kAhead = 4;
  __shared__ float results[kFinishWarps][kMostHeadDim];
  const auto queries = static_cast<unsigned>(t.group() * t.tokens), tokens = static_cast<unsigned>(t.tokens);
  const auto kv_heads = static_cast<unsigned>(t.kv_heads);
  const unsigned row = blockIdx.x / queries, index = blockIdx.x % queries;
  const int64_t batch = row / kv_heads, head = row % kv_heads * t.group() + index / tokens, token = index % tokens;
  const float* known = partial_of(t, partial, parts, row, 0, index);
  const int64_t distance = queries * (2 + t.head_dim);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int count = static_cast<int>(parts.count), head_dim = static_cast<int>(t.head_dim);
  const auto load = [&](int part, float(&of_part)[kOfLane]) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int element = lane + i * kWarpThreads;
      of_part[i] = part < count && element < head_dim ? known[part * distance + 2 + element] : 0.f;
    }
  };
  float ahead[kAhead][kOfLane];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) load(warp + k * kFinishWarps, ahead[k]);
  float top = kNever, sum = 0, result[kOfLane] = {};
  for (int part = lane; part < count; part += kWarpThreads) top = Maximum::combine(known[part * distance], top);
  top = over_warp<Maximum>(top);
  for (int part = lane; part < count; part += kWarpThreads) {
    sum += known[part * distance + 1] * relative(known[part * distance], top);
  }
  sum = over_warp<Sum>(sum);
  const auto add = [&](int part, const float(&of_part)[kOfLane]) {
    if (part >= count) return;
    const float weight = relative(known[part * distance], top);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) result[i] += of_part[i] * weight;
  };
#pragma unroll
  for (int k = 0; k < kAhead; ++k) add(warp + k * kFinishWarps, ahead[k]);
  for (int part = warp + kAhead * kFinishWarps; part < count; part += kFinishWarps) {
    float of_part[kOfLane];
    load(part, of_part);
    add(part, of_part);
  }
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) results[warp][lane + i * kWarpThreads] = result[i];
  __syncthreads();
  if (thread >= head_dim) return;
  float total = 0;
  for (int w = 0; w < kFinishWarps; ++w) total += results[w][thread];
  auto* output = static_cast<Element*>(t.output) + ((batch * t.tokens + token) * t.heads + head) * t.head_dim;
  narrow(sum == 0 ? 0.f : total / sum, output[thread]);
}

// ---- around torch's attention ------------------------------------------------------------------------------------

// `blocks_of_head` blocks for the new tokens of a head of keys.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const AttentionAppend append, const int lanes, const unsigned blocks_of_head) {
  const Attention& t = append.attention;
  const int64_t row = blockIdx.x / blocks_of_head, batch = row / t.kv_heads, kv_head = row - batch * t.kv_heads;
  const int slice = static_cast<int>(threadIdx.x) % lanes * kSlice, together = kThreads / lanes;
  const int64_t begin = t.past + static_cast<int64_t>(blockIdx.x % blocks_of_head) * together;
  append_rounded(keys_of<Element, int8_t>(t, batch, kv_head, slice), values_of<Element, int8_t>(t, batch, kv_head, slice),
                 t.past, begin, begin + together < t.total ? begin + together : t.total, lanes);
}

// What leaves no weight beside any score. Not -inf: what torch's kernels make of a row of it differs; nor the lowest number
// of all, which they may multiply.
__device__ __forceinline__ float unattended(float) { return -1e38f; }
__device__ __forceinline__ float unattended(BFloat16) { return -1e38f; }
__device__ __forceinline__ float unattended(Float16) { return -65504.f; }

// What the largest number of a query's mask becomes where it is below half of that: else what is forbidden would count.
// Scores beside the number that it was are lost or not, as they are beside this one.
__device__ __forceinline__ float lowest_attended(float) { return -5e37f; }
__device__ __forceinline__ float lowest_attended(BFloat16) { return -5e37f; }
__device__ __forceinline__ float lowest_attended(Float16) { return 0.f; }

// A block for each query. Numbers that are all moved by the same change no weight.
template <class Element>
__global__ void __launch_bounds__(kThreads) bias_kernel(const AttentionBias bias) {
  const Attention& t = bias.attention;
  const int64_t row = blockIdx.x, token = row % t.tokens, head = row / t.tokens % bias.heads;
  const int64_t batch = row / t.tokens / bias.heads;
  auto* to = static_cast<Element*>(bias.data) + row * bias.stride;
  const float low = unattended(Element{});
  float largest = kNever;
  for (int64_t position = threadIdx.x; position < t.total; position += kThreads) {
    const float added = biased<Element>(t, 0.f, batch, head, token, position);
    largest = Maximum::combine(largest, added == added ? added : 0.f);
  }
  largest = over_block<Maximum>(largest);
  const bool moves = largest < low / 2 && largest != kNever;
  for (int64_t position = threadIdx.x; position < t.total; position += kThreads) {
    float added = biased<Element>(t, 0.f, batch, head, token, position);
    if (moves) added = added - largest + lowest_attended(Element{});
    narrow(added == kNever ? low : added, to[position]);
  }
  if (threadIdx.x == 0) bias.sees[row] = largest == kNever ? 0.f : 1.f;
}

// A thread for each query.
template <class Element>
__global__ void __launch_bounds__(kThreads) zeros_kernel(const AttentionZeros bias) {
  const Attention& t = bias.attention;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= t.batch * t.tokens * t.heads) return;
  const int64_t head = row % t.heads, token = row / t.heads % t.tokens, batch = row / t.heads / t.tokens;
  const int64_t own_batch = bias.batches == 1 ? 0 : batch, own_head = bias.heads == 1 ? 0 : head;
  if (bias.sees[(own_batch * bias.heads + own_head) * t.tokens + token] != 0) return;
  auto* output = static_cast<Element*>(t.output) + row * t.head_dim;
  for (int64_t i = 0; i < t.head_dim; ++i) narrow(0.f, output[i]);
}

bool fit_packs(const Attention& t) {
  const auto fits = [](const void* data, const HeadStrides& s) {
    return is_aligned(data) && s.batch % kSlice == 0 && s.head % kSlice == 0 && s.token % kSlice == 0;
  };
  return t.head_dim % kSlice == 0 && fits(t.key_cache, t.key_cache_strides) &&
         fits(t.value_cache, t.value_cache_strides);
}

// Threads that share a head.
int lanes_of(const Attention& t) {
  int lanes = 1;
  while (lanes * kSlice < t.head_dim) lanes *= 2;
  return lanes;
}

// Calls `with(tile)` for the queries that a head of keys has.
template <class With>
void with_tile(int64_t queries, const With& with) {
  if (queries == 1) return with(Constant<1>{});
  if (queries <= 4) return with(Constant<4>{});
  with(Constant<8>{});
}

}  // namespace

template <>
void compute(const AttentionAppend& append, Dtype dtype, const Stream& stream) {
  const Attention& t = append.attention;
  const int lanes = lanes_of(t), together = kThreads / lanes;
  const int64_t blocks_of_head = (t.total - t.past + together - 1) / together;
  const dim3 blocks = grid(stream, t.batch * t.kv_heads * blocks_of_head);
  with_element(dtype, [&](auto element) {
    launch(stream, append_kernel<decltype(element)>, blocks, kThreads, append, lanes,
           static_cast<unsigned>(blocks_of_head));
  });
}

template <>
void compute(const AttentionBias& bias, Dtype dtype, const Stream& stream) {
  const int64_t rows = bias.batches * bias.heads * bias.attention.tokens;
  with_element(dtype, [&](auto element) {
    launch(stream, bias_kernel<decltype(element)>, grid(stream, rows), kThreads, bias);
  });
}

template <>
void compute(const AttentionZeros& zeros, Dtype dtype, const Stream& stream) {
  const int64_t rows = zeros.attention.batch * zeros.attention.tokens * zeros.attention.heads;
  with_element(dtype, [&](auto element) {
    launch(stream, zeros_kernel<decltype(element)>, grid(stream, (rows + kThreads - 1) / kThreads), kThreads, zeros);
  });
}

template <>
void compute(const Attention& t, Dtype dtype, const Stream& stream) {
  const Parts parts(t);
  auto* const partial = stream.room<float>(t.batch * t.heads * t.tokens * parts.count * (2 + t.head_dim));
  const int lanes = lanes_of(t);
  const int64_t rows = t.batch * t.kv_heads, queries = t.group() * t.tokens;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto run = [&](auto kernel) { launch(stream, kernel, grid(stream, rows * parts.count), kThreads, t, parts, partial); };
    const auto attend = [&](auto cached) {
      using Cached = decltype(cached);
      with_tile(queries, [&](auto tile) {
        const bool packed = fit_packs(t);
        const auto kernel =
            packed ? attend_kernel<Element, Cached, tile, true> : attend_kernel<Element, Cached, tile, false>;
        launch(stream, kernel, grid(stream, rows * parts.count), kThreads, t, parts, partial, lanes);
      });
    };
    if (fits_mma(t, dtype) && has_mma()) {
      with_mma_kernel<Element>(t, run);
    } else {
      t.key_scales ? attend(int8_t{}) : attend(element);
    }
    launch(stream, finish_kernel<Element>, grid(stream, rows * queries), kFinishThreads, t, parts, partial);
  });
}

}  // namespace ds_kernels::cuda
