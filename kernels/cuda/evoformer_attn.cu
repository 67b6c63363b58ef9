// Attention of the Evoformer. A thread has a query, or a key, in registers, and goes through tiles of the others in shared
// memory. Every sum has one order: the gradient of the rows' bias is added up by the threads of its keys over heads and
// queries, that of the pairs' bias by those of its queries over rows.

#include <ds_kernels/evoformer_attn.h>

#include "element.cuh"
#include "launch.cuh"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr int kThreads = 64;  // of a block: as many queries, or keys
constexpr int kTile = 16;     // of the others, in shared memory at a time

// One head of one row.
struct Head {
  int64_t b, n, h;
};

// A block's number as those of a tile and of what it is a tile of.
struct TileOf {
  int64_t of, tile;

  __device__ __forceinline__ explicit TileOf(unsigned tiles) : of(blockIdx.x / tiles), tile(blockIdx.x % tiles) {}
  __device__ __forceinline__ int64_t position() const { return tile * kThreads + threadIdx.x; }
};

// A token's part of a head times `factor`, zeros beyond it and where `there` is false.
template <class Element, int width>
__device__ __forceinline__ void load_token(const EvoformerShape& s, const void* tensor, Head at, int64_t t, bool there,
                                           float factor, float (&to)[width]) {
  const auto* from = static_cast<const Element*>(tensor) + (there ? s.at(at.b, at.n, t, at.h) : 0);
#pragma unroll
  for (int d = 0; d < width; ++d) to[d] = there && d < s.head_dim ? widen(from[d]) * factor : 0.f;
}

template <class Element, int width>
__device__ __forceinline__ void store_token(const EvoformerShape& s, void* tensor, Head at, int64_t t, float factor,
                                            const float (&from)[width]) {
  auto* to = static_cast<Element*>(tensor) + s.at(at.b, at.n, t, at.h);
#pragma unroll
  for (int d = 0; d < width; ++d) {
    if (d < s.head_dim) narrow(from[d] * factor, to[d]);
  }
}

// A tile of tokens, by all threads of a block.
template <class Element, int width>
__device__ __forceinline__ void load_tile(const EvoformerShape& s, const void* tensor, Head at, int64_t first,
                                          float factor, float (&to)[kTile][width]) {
  for (int e = static_cast<int>(threadIdx.x); e < kTile * width; e += kThreads) {
    const int t = e / width, d = e % width;
    const bool there = first + t < s.tokens && d < s.head_dim;
    to[t][d] = there ? widen(static_cast<const Element*>(tensor)[s.at(at.b, at.n, first + t, at.h) + d]) * factor : 0.f;
  }
}

template <int width>
__device__ __forceinline__ float product(const float (&a)[width], const float (&b)[width]) {
  float sum = 0;
#pragma unroll
  for (int d = 0; d < width; ++d) sum += a[d] * b[d];
  return sum;
}

template <int width>
__device__ __forceinline__ void add_product(float a, const float (&b)[width], float (&to)[width]) {
#pragma unroll
  for (int d = 0; d < width; ++d) to[d] += a * b[d];
}

// What is added to the score of query `i` and key `j`.
template <class Element>
__device__ __forceinline__ float bias_of(const EvoformerInputs& in, Head at, int64_t i, int64_t j) {
  const EvoformerShape& s = in.shape;
  float bias = 0;
  if (in.mask_bias) bias += widen(static_cast<const Element*>(in.mask_bias)[(at.b * s.rows + at.n) * s.tokens + j]);
  if (in.pair_bias) {
    bias += widen(static_cast<const Element*>(in.pair_bias)[((at.b * s.heads + at.h) * s.tokens + i) * s.tokens + j]);
  }
  return bias;
}

// e^(score - sum); 0 for a query that may attend to nothing.
__device__ __forceinline__ float weight_of(float score, float sum) {
  return sum == kNoScore ? 0.f : exponential(score - sum);
}

template <class Element, int width>
__global__ void __launch_bounds__(kThreads) evoformer_kernel(const EvoformerAttention w, const unsigned tiles) {
  __shared__ float keys[kTile][width], values[kTile][width];
  const EvoformerShape& s = w.in.shape;
  const TileOf block(tiles);
  const Head at{block.of / s.heads / s.rows, block.of / s.heads % s.rows, block.of % s.heads};
  const int64_t i = block.position();
  const bool there = i < s.tokens;
  float query[width], result[width] = {}, top = kNoScore, sum = 0;
  bool broken = false;  // a score is NaN
  load_token<Element>(s, w.in.query, at, i, there, w.in.scale, query);
  for (int64_t first = 0; first < s.tokens; first += kTile) {
    __syncthreads();  // the tile before has been read
    load_tile<Element>(s, w.in.key, at, first, 1, keys);
    load_tile<Element>(s, w.in.value, at, first, 1, values);
    __syncthreads();
    if (!there) continue;
    float scores[kTile], next = top;
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      const bool counts = first + t < s.tokens;
      scores[t] = counts ? product(query, keys[t]) + bias_of<Element>(w.in, at, i, first + t) : kNoScore;
      next = scores[t] > next ? scores[t] : next;
      broken |= scores[t] != scores[t];
    }
    if (next == kNoScore && !broken) continue;
    const float faded = top == kNoScore ? 0.f : exponential(top - next);
    top = next;
    sum *= faded;
#pragma unroll
    for (int d = 0; d < width; ++d) result[d] *= faded;
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      if (first + t >= s.tokens) continue;
      const float weight = exponential(scores[t] - top);
      sum += weight;
      add_product(weight, values[t], result);
    }
  }
  if (!there) return;
  store_token<Element>(s, w.output, at, i, sum == 0 ? 0.f : 1 / sum, result);
  const bool infinite = (top == kNoScore || top == -kNoScore) && !broken;
  w.logsumexp[s.sum_at(at.b, at.n, at.h, i)] = infinite ? top : top + logf(sum);
}

// ---- gradients -----------------------------------------------------------------------------------------------------

// What is known of a query before its keys: its gradient along the output, and l.
template <class Element>
__device__ __forceinline__ float along_output(const EvoformerBackward& w, Head at, int64_t i) {
  const EvoformerShape& s = w.in.shape;
  const auto* grad = static_cast<const Element*>(w.grad) + s.at(at.b, at.n, i, at.h);
  const auto* output = static_cast<const Element*>(w.output) + s.at(at.b, at.n, i, at.h);
  float sum = 0;
  for (int64_t d = 0; d < s.head_dim; ++d) sum += widen(grad[d]) * widen(output[d]);
  return sum;
}

template <class Element, int width>
__global__ void __launch_bounds__(kThreads) evoformer_query_grad_kernel(const EvoformerBackward w, const unsigned tiles) {
  __shared__ float keys[kTile][width], values[kTile][width];
  const EvoformerShape& s = w.in.shape;
  const TileOf block(tiles);
  const Head at{block.of / s.heads / s.rows, block.of / s.heads % s.rows, block.of % s.heads};
  const int64_t i = block.position();
  const bool there = i < s.tokens;
  float query[width], grad[width], result[width] = {};
  load_token<Element>(s, w.in.query, at, i, there, w.in.scale, query);
  load_token<Element>(s, w.grad, at, i, there, 1, grad);
  const float along = there ? along_output<Element>(w, at, i) : 0.f;
  const float sum = there ? w.logsumexp[s.sum_at(at.b, at.n, at.h, i)] : kNoScore;
  for (int64_t first = 0; first < s.tokens; first += kTile) {
    __syncthreads();
    load_tile<Element>(s, w.in.key, at, first, 1, keys);
    load_tile<Element>(s, w.in.value, at, first, 1, values);
    __syncthreads();
    if (sum == kNoScore) continue;
    for (int t = 0; t < kTile && first + t < s.tokens; ++t) {
      const float weight = weight_of(product(query, keys[t]) + bias_of<Element>(w.in, at, i, first + t), sum);
      add_product(weight * (product(grad, values[t]) - along), keys[t], result);
    }
  }
  if (there) store_token<Element>(s, w.query_grad, at, i, w.in.scale, result);
}

template <class Element, int width>
__global__ void __launch_bounds__(kThreads) evoformer_key_grad_kernel(const EvoformerBackward w, const unsigned tiles) {
  __shared__ float queries[kTile][width], grads[kTile][width], alongs[kTile], sums[kTile];
  const EvoformerShape& s = w.in.shape;
  const TileOf block(tiles);
  const int64_t j = block.position();
  const bool there = j < s.tokens;
  float of_mask = 0;
  for (int64_t h = 0; h < s.heads; ++h) {
    const Head at{block.of / s.rows, block.of % s.rows, h};
    float key[width], value[width], of_key[width] = {}, of_value[width] = {};
    load_token<Element>(s, w.in.key, at, j, there, 1, key);
    load_token<Element>(s, w.in.value, at, j, there, 1, value);
    for (int64_t first = 0; first < s.tokens; first += kTile) {
      __syncthreads();
      load_tile<Element>(s, w.in.query, at, first, w.in.scale, queries);
      load_tile<Element>(s, w.grad, at, first, 1, grads);
      const int64_t i = first + static_cast<int64_t>(threadIdx.x);
      if (threadIdx.x < kTile) {
        alongs[threadIdx.x] = i < s.tokens ? along_output<Element>(w, at, i) : 0.f;
        sums[threadIdx.x] = i < s.tokens ? w.logsumexp[s.sum_at(at.b, at.n, at.h, i)] : kNoScore;
      }
      __syncthreads();
      if (!there) continue;
      for (int t = 0; t < kTile && first + t < s.tokens; ++t) {
        if (sums[t] == kNoScore) continue;
        const float weight = weight_of(product(queries[t], key) + bias_of<Element>(w.in, at, first + t, j), sums[t]);
        const float of_score = weight * (product(grads[t], value) - alongs[t]);
        add_product(weight, grads[t], of_value);
        add_product(of_score, queries[t], of_key);
        of_mask += of_score;
      }
    }
    if (!there) continue;
    store_token<Element>(s, w.key_grad, at, j, 1, of_key);
    store_token<Element>(s, w.value_grad, at, j, 1, of_value);
  }
  if (there && w.mask_grad) w.mask_grad[block.of * s.tokens + j] = of_mask;
}

// A block has some queries and one tile of keys, of all rows.
template <class Element, int width>
__global__ void __launch_bounds__(kThreads) evoformer_pair_grad_kernel(const EvoformerBackward w, const unsigned tiles,
                                                                       const unsigned key_tiles) {
  __shared__ float keys[kTile][width], values[kTile][width];
  const EvoformerShape& s = w.in.shape;
  const TileOf block(tiles * key_tiles);
  const int64_t i = block.tile / key_tiles * kThreads + threadIdx.x, first = block.tile % key_tiles * kTile;
  const bool there = i < s.tokens;
  float result[kTile] = {};
  for (int64_t n = 0; n < s.rows; ++n) {
    const Head at{block.of / s.heads, n, block.of % s.heads};
    __syncthreads();
    load_tile<Element>(s, w.in.key, at, first, 1, keys);
    load_tile<Element>(s, w.in.value, at, first, 1, values);
    __syncthreads();
    const float sum = there ? w.logsumexp[s.sum_at(at.b, at.n, at.h, i)] : kNoScore;
    if (sum == kNoScore) continue;
    float query[width], grad[width];
    load_token<Element>(s, w.in.query, at, i, there, w.in.scale, query);
    load_token<Element>(s, w.grad, at, i, there, 1, grad);
    const float along = along_output<Element>(w, at, i);
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      if (first + t >= s.tokens) continue;
      const float weight = weight_of(product(query, keys[t]) + bias_of<Element>(w.in, at, i, first + t), sum);
      result[t] += weight * (product(grad, values[t]) - along);
    }
  }
  if (!there) return;
#pragma unroll
  for (int t = 0; t < kTile; ++t) {
    if (first + t < s.tokens) w.pair_grad[(block.of * s.tokens + i) * s.tokens + first + t] = result[t];
  }
}

// Calls `with(element, width)`, of whose arguments the types count.
template <class With>
void with_heads(Dtype dtype, int64_t head_dim, const With& with) {
  with_element(dtype, [&](auto element) {
    head_dim <= 32 ? with(element, Constant<32>{}) : with(element, Constant<64>{});
  });
}

unsigned tiles_of(int64_t tokens, int64_t size) { return static_cast<unsigned>((tokens + size - 1) / size); }

}  // namespace

template <>
void compute(const EvoformerAttention& w, Dtype dtype, const Stream& stream) {
  const EvoformerShape& s = w.in.shape;
  const unsigned tiles = tiles_of(s.tokens, kThreads);
  with_heads(dtype, s.head_dim, [&](auto element, auto width) {
    launch(stream, evoformer_kernel<decltype(element), width>, grid(stream, s.batch * s.rows * s.heads * tiles), kThreads,
           w, tiles);
  });
}

template <>
void compute(const EvoformerBackward& w, Dtype dtype, const Stream& stream) {
  const EvoformerShape& s = w.in.shape;
  const unsigned tiles = tiles_of(s.tokens, kThreads), key_tiles = tiles_of(s.tokens, kTile);
  with_heads(dtype, s.head_dim, [&](auto element, auto width) {
    using Element = decltype(element);
    launch(stream, evoformer_query_grad_kernel<Element, width>, grid(stream, s.batch * s.rows * s.heads * tiles),
           kThreads, w, tiles);
    launch(stream, evoformer_key_grad_kernel<Element, width>, grid(stream, s.batch * s.rows * tiles), kThreads, w, tiles);
    if (!w.pair_grad) return;
    launch(stream, evoformer_pair_grad_kernel<Element, width>, grid(stream, s.batch * s.heads * tiles * key_tiles),
           kThreads, w, tiles, key_tiles);
  });
}

}  // namespace ds_kernels::cuda
