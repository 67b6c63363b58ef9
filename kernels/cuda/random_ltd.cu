// Random layerwise token dropping. Tokens and masks are moved a pack a thread; indices are sorted by counting, a block a
// row. An index that is no token fails an assertion on the device, as it does in torch's own indexing.
#undef NDEBUG  // nothing else checks indices
#include <cassert>

#include <ds_kernels/random_ltd.h>

#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpThreads;
constexpr int kEach = 16, kCounted = kThreads * kEach;  // tokens of a thread, of a block, that are counted together

__device__ __forceinline__ int32_t checked(int32_t index, int64_t sequence) {
  assert(index >= 0 && index < sequence && "indices has an entry that is no token");
  return index;
}

// Rows of a launch fit into 32 bits, and a division of 64 would take longer than the work.
__device__ __forceinline__ int64_t divided(int64_t row, int64_t by) {
  return static_cast<unsigned>(row) / static_cast<unsigned>(by);
}

// ---- sorting -----------------------------------------------------------------------------------------------------

// The sum of `x` over the threads before the calling one, and over all.
struct Before {
  int mine, all;

  __device__ __forceinline__ explicit Before(int x) {
    __shared__ int sums[kWarps];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpThreads;
    mine = x;
#pragma unroll
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      const int lower = __shfl_up_sync(kWholeWarp, mine, distance);
      if (lane >= distance) mine += lower;
    }
    __syncthreads();  // the sums of a call before this one have been read
    if (lane == kWarpThreads - 1) sums[thread / kWarpThreads] = mine;
    __syncthreads();
    mine -= x;
    all = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < thread / kWarpThreads) mine += sums[warp];
      all += sums[warp];
    }
  }
};

__global__ void __launch_bounds__(kThreads) sort_kernel(const TokenRows r) {
  constexpr unsigned kNone = ~0u;
  __shared__ int counts[kCounted];
  __shared__ unsigned next;  // the smallest token beyond those that are counted: no sequence is too long
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t* from = r.from + blockIdx.x * r.reserved;
  int32_t* to = r.to + blockIdx.x * r.reserved;
  unsigned first = 0;
  do {
    for (int i = thread; i < kCounted; i += kThreads) counts[i] = 0;
    if (thread == 0) next = kNone;
    __syncthreads();
    unsigned later = kNone;
    for (int64_t i = thread; i < r.reserved; i += kThreads) {
      const unsigned index = checked(from[i], r.sequence);
      if (index < first) continue;
      if (index - first < kCounted) {
        atomicAdd(&counts[index - first], 1);
      } else if (index < later) {
        later = index;
      }
    }
    if (later != kNone) atomicMin(&next, later);
    __syncthreads();
    int own = 0;
    for (int i = 0; i < kEach; ++i) own += counts[thread * kEach + i];
    const Before before(own);
    int32_t* at = to + before.mine;
    for (int i = thread * kEach; i < (thread + 1) * kEach; ++i) {
      for (int count = counts[i]; count > 0; --count) *at++ = static_cast<int32_t>(first + i);
    }
    to += before.all;
    first = next;
    __syncthreads();  // the counts have been read
  } while (first != kNone);
}

// ---- tokens ------------------------------------------------------------------------------------------------------

// For each token of a sequence 1 + the last number under which it was chosen, or 0. A block for each sequence.
__global__ void __launch_bounds__(kThreads) last_kernel(const TokenMove m, int32_t* last) {
  const int32_t* indices = m.indices + blockIdx.x * m.reserved;
  last += blockIdx.x * m.sequence;
  for (int64_t i = threadIdx.x; i < m.sequence; i += kThreads) last[i] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < m.reserved; i += kThreads) {
    atomicMax(&last[checked(indices[i], m.sequence)], static_cast<int32_t>(i + 1));
  }
}

template <class Word>
__device__ __forceinline__ Word* word_of(const Tokens& tokens, int64_t sequence, int64_t token, int64_t word) {
  return reinterpret_cast<Word*>(tokens.data + sequence * tokens.sequence + token * tokens.token) + word;
}

template <class Word>
__global__ void gather_kernel(const TokenMove m, const unsigned blocks_of_row) {
  const auto [row, word] = Place(blocks_of_row, 1);
  if (word * static_cast<int64_t>(sizeof(Word)) >= m.bytes) return;
  const int64_t sequence = divided(row, m.reserved), token = row - sequence * m.reserved;
  *word_of<Word>(m.chosen, sequence, token, word) =
      *word_of<Word>(m.all, sequence, checked(m.indices[row], m.sequence), word);
}

template <class Word>
__global__ void scatter_kernel(const TokenMove m, const int32_t* last, const unsigned blocks_of_row) {
  const auto [row, word] = Place(blocks_of_row, 1);
  if (word * static_cast<int64_t>(sizeof(Word)) >= m.bytes) return;
  const int64_t sequence = divided(row, m.reserved), token = row - sequence * m.reserved, index = m.indices[row];
  if (last[sequence * m.sequence + index] != token + 1) return;  // the same token comes again
  *word_of<Word>(m.all, sequence, index, word) = *word_of<Word>(m.chosen, sequence, token, word);
}

// Calls `with(word)` for the largest word that all tokens consist of and begin at, of whose argument the type counts.
template <class With>
void with_word(const TokenMove& m, const With& with) {
  uintptr_t all = static_cast<uintptr_t>(m.bytes);
  for (const Tokens& tokens : {m.all, m.chosen}) {
    all |= reinterpret_cast<uintptr_t>(tokens.data) | static_cast<uintptr_t>(tokens.sequence | tokens.token);
  }
  if (all % 16 == 0) return with(uint4{});
  if (all % 4 == 0) return with(uint32_t{});
  if (all % 2 == 0) return with(uint16_t{});
  with(uint8_t{});
}

template <class Element>
__global__ void mask_kernel(const MaskGather g, const unsigned blocks_of_row) {
  const auto [row, column] = Place(blocks_of_row, 1);
  if (column >= g.reserved) return;
  const int64_t sequence = divided(row, g.reserved);  // of layers * batch
  const int32_t* indices = g.indices + sequence * g.reserved;
  const int64_t batch = sequence - divided(sequence, g.batch) * g.batch;
  const int64_t from = (batch * g.sequence + checked(g.indices[row], g.sequence)) * g.sequence;
  reinterpret_cast<Element*>(g.output)[row * g.reserved + column] =
      reinterpret_cast<const Element*>(g.mask)[from + checked(indices[column], g.sequence)];
}

}  // namespace

// ---- launches ----------------------------------------------------------------------------------------------------

// To know it would be to wait for the device: kernels assert it.
template <>
void compute(const TokenCheck&, Dtype, const Stream&) {}

template <>
void compute(const TokenRows& r, Dtype, const Stream& stream) {
  if (r.reserved == 0) return;
  launch(stream, sort_kernel, grid(stream, r.rows), kThreads, r);
}

template <>
void compute(const TokenGather& m, Dtype, const Stream& stream) {
  if (m.bytes == 0) return;
  with_word(m, [&](auto word) {
    using Word = decltype(word);
    const Share share(m.bytes / static_cast<int64_t>(sizeof(Word)));
    launch(stream, gather_kernel<Word>, share.blocks(stream, m.batch * m.reserved), share.threads, m,
           share.blocks_of_row);
  });
}

template <>
void compute(const TokenScatter& m, Dtype, const Stream& stream) {
  if (m.bytes == 0 || m.reserved == 0) return;
  auto* const last = stream.room<int32_t>(m.batch * m.sequence);
  launch(stream, last_kernel, grid(stream, m.batch), kThreads, m, last);
  with_word(m, [&](auto word) {
    using Word = decltype(word);
    const Share share(m.bytes / static_cast<int64_t>(sizeof(Word)));
    launch(stream, scatter_kernel<Word>, share.blocks(stream, m.batch * m.reserved), share.threads, m, last,
           share.blocks_of_row);
  });
}

template <>
void compute(const MaskGather& g, Dtype, const Stream& stream) {
  if (g.reserved == 0) return;
  const Share share(g.reserved);
  const auto kernel = g.element_size == 1   ? mask_kernel<uint8_t>
                      : g.element_size == 2 ? mask_kernel<uint16_t>
                      : g.element_size == 4 ? mask_kernel<uint32_t>
                                            : mask_kernel<uint64_t>;
  launch(stream, kernel, share.blocks(stream, g.layers * g.batch * g.reserved), share.threads, g, share.blocks_of_row);
}

}  // namespace ds_kernels::cuda
