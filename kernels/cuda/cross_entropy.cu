// Cross entropy of rows of logits and its gradient, a block for each row. A target that is no column fails an assertion
// on the device, as it does in torch's own cross entropy.
//
// A row is too long for registers. It is read once for the largest logit and the sum of exponentials, which is rescaled
// where a larger one is found (Milakov & Gimelshein 2018), and once for the gradient: from its end, which the L2 cache
// still has.
#undef NDEBUG  // nothing else checks targets
#include <cassert>

#include <ds_kernels/cross_entropy.h>

#include "launch.cuh"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

// Two blocks of so many find room on a multiprocessor, of which one reads while the other writes.
constexpr int kMaxThreads = 512;
constexpr int kTogether = 4;  // packs that a thread asks for before it waits for the first

template <class Element>
__device__ __forceinline__ float exponential_of(float x) {
  if constexpr (std::is_same_v<Element, float>) return expf(x);
  return __expf(x);
}

template <class Element, int pack>
struct Logits {
  Element* row;
  int64_t columns;
  float cap, per_cap;

  static constexpr int kColumns = kTogether * pack;  // that a thread has of a group

  __device__ __forceinline__ float bent(float x) const { return cap == 0 ? x : cap * bounded_by_one(x * per_cap); }

  // Groups of packs, one of each thread.
  __device__ __forceinline__ int64_t groups() const {
    const int64_t group = static_cast<int64_t>(blockDim.x) * kColumns;
    return (columns + group - 1) / group;
  }
  __device__ __forceinline__ int64_t column(int64_t group, int i) const {
    return ((group * kTogether + i) * blockDim.x + threadIdx.x) * pack;
  }

  // Calls `body(column, values)` for the calling thread's packs of a group, all of which have been read by then.
  template <class Body>
  __device__ __forceinline__ void for_each(int64_t group, const Body& body) const {
    Words<Element, pack> words[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (column(group, i) < columns) words[i].load_from(row + column(group, i));
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (column(group, i) >= columns) break;
      float x[pack];
      words[i].widen_to(x);
      body(column(group, i), x);
    }
  }
};

// The sums over some y of e^(y - top) and of y - top, for the largest of them so far.
template <class Element>
struct Exponentials {
  float top = -kInfinity, count = 0;
  Two<float> sums{};

  // Where all are -inf, e^(y - 0) is 0.
  static __device__ __forceinline__ float shift_of(float top) { return top == -kInfinity ? 0.f : top; }

  template <int pack>
  __device__ __forceinline__ void add(const float (&y)[pack], bool smooths) {
    float larger = top;
#pragma unroll
    for (int j = 0; j < pack; ++j) larger = Maximum::combine(larger, y[j]);
    move_to(larger, smooths);
    const float shift = shift_of(top);
#pragma unroll
    for (int j = 0; j < pack; ++j) sums.first += exponential_of<Element>(y[j] - shift);
    if (!smooths) return;
    count += pack;
#pragma unroll
    for (int j = 0; j < pack; ++j) sums.second += y[j] - shift;
  }

  // The same sums for a larger top.
  __device__ __forceinline__ void move_to(float larger, bool smooths) {
    const float shift = shift_of(larger);
    sums.first *= exponential_of<Element>(top - shift);
    if (smooths && count > 0) sums.second += count * (shift_of(top) - shift);
    top = larger;
  }
};

template <class Element, int pack>
__global__ void __launch_bounds__(kMaxThreads, 2) cross_entropy_kernel(const CrossEntropyRows r) {
  const int64_t index = blockIdx.x, target = r.target[index];
  auto* row = row_of<Element>(r.logits, index, r.columns);
  if (target == r.ignore_index) {
    const float zeros[pack] = {};
    if (threadIdx.x == 0) r.loss[index] = 0.f;
    for (int64_t i = threadIdx.x * pack; r.gradient && i < r.columns; i += blockDim.x * pack) {
      store<pack>(row + i, zeros);
    }
    return;
  }
  assert(target >= 0 && target < r.columns && "target has an entry that is no column");
  const Logits<Element, pack> logits{row, r.columns, r.softcap, r.softcap == 0 ? 0.f : 1.f / r.softcap};
  const bool smooths = r.label_smoothing != 0;
  const float of_target = threadIdx.x == 0 ? logits.bent(widen(row[target])) : 0.f;  // before the gradient is there
  Exponentials<Element> part;
  const int64_t groups = logits.groups();
  for (int64_t group = 0; group < groups; ++group) {
    logits.for_each(group, [&](int64_t, float(&y)[pack]) {
#pragma unroll
      for (int j = 0; j < pack; ++j) y[j] = logits.bent(y[j]);
      part.add(y, smooths);
    });
  }
  const float top = over_block<Maximum>(part.top);
  part.move_to(top, smooths);
  const auto sums = over_block<Sum>(part.sums);
  const float sum = top == -kInfinity ? top - top : sums.first;  // a NaN, as infinities of either sign have it
  const float log_sum = logf(sum), logsumexp = top + log_sum;
  const float everywhere = r.label_smoothing / static_cast<float>(r.columns), there = 1.f - r.label_smoothing;
  if (threadIdx.x == 0) {
    const float smooth = smooths ? everywhere * sums.second : 0.f;
    r.loss[index] = log_sum - there * (of_target - top) - smooth + r.z_loss * logsumexp * logsumexp;
  }
  if (!r.gradient) return;
  const float factor = (1.f + 2.f * r.z_loss * logsumexp) / sum;
  for (int64_t group = groups - 1; group >= 0; --group) {
    logits.for_each(group, [&](int64_t i, float(&x)[pack]) {
      float gradient[pack];
#pragma unroll
      for (int j = 0; j < pack; ++j) {
        gradient[j] = exponential_of<Element>(logits.bent(x[j]) - top) * factor - everywhere;
      }
      if (target >= i && target < i + pack) {
#pragma unroll
        for (int j = 0; j < pack; ++j) gradient[j] -= i + j == target ? there : 0.f;
      }
      if (r.softcap != 0) {
#pragma unroll
        for (int j = 0; j < pack; ++j) gradient[j] *= bounded_slope(x[j] * logits.per_cap);
      }
      store<pack>(row + i, gradient);
    });
  }
}

// Blocks of at least a warp: one pack for each thread, if they are that few.
unsigned threads_of(int64_t packs) {
  const int64_t warps = (packs + kWarpThreads - 1) / kWarpThreads;
  return static_cast<unsigned>(std::min<int64_t>(std::max<int64_t>(warps * kWarpThreads, kWarpThreads), kMaxThreads));
}

}  // namespace

// To know it would be to wait for the device: the kernel asserts it.
template <>
void compute(const TargetCheck&, Dtype, const Stream&) {}

template <>
void compute(const CrossEntropyRows& r, Dtype dtype, const Stream& stream) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto run = [&](auto pack) {
      launch(stream, cross_entropy_kernel<Element, pack>, grid(stream, r.rows), threads_of(r.columns / pack), r);
    };
    if (in_packs<Element>(r.columns, r.logits)) {
      run(Constant<kPack<Element>>{});
    } else {
      run(Constant<1>{});
    }
  });
}

}  // namespace ds_kernels::cuda
