// Cross entropy of rows of logits and its gradient, a block for each row. A target that is no column fails an assertion
// on the device, as it does in torch's own cross entropy.
#undef NDEBUG  // nothing else checks targets
#include <cassert>

#include <ds_kernels/cross_entropy.h>

#include "launch.cuh"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

template <class Element, int pack>
__global__ void __launch_bounds__(kMaxRowThreads) cross_entropy_kernel(const CrossEntropyRows r) {
  const int64_t index = blockIdx.x, target = r.target[index];
  auto* logits = row_of<Element>(r.logits, index, r.columns);
  if (target == r.ignore_index) {
    const float zeros[pack] = {};
    if (threadIdx.x == 0) r.loss[index] = 0.f;
    for (int64_t i = threadIdx.x * pack; r.gradient && i < r.columns; i += blockDim.x * pack) {
      store<pack>(logits + i, zeros);
    }
    return;
  }
  assert(target >= 0 && target < r.columns && "target has an entry that is no column");
  const float cap = r.softcap, per_cap = cap == 0 ? 0.f : 1.f / cap;
  const auto gather = [=](int64_t i, float(&y)[pack]) {
    load<pack>(logits + i, y);
#pragma unroll
    for (int j = 0; j < pack; ++j) y[j] = cap == 0 ? y[j] : cap * bounded_by_one(y[j] * per_cap);
  };
  Row<pack, decltype(gather)> row(r.columns, gather);
  float top = -kInfinity, mine = 0;  // the largest, and the target's, which one thread has
  row.for_each([&](int64_t i, float(&y)[pack]) {
#pragma unroll
    for (int j = 0; j < pack; ++j) {
      top = Maximum::combine(top, y[j]);
      if (i + j == target) mine = y[j];
    }
  });
  top = over_block<Maximum>(top);
  const float of_target = over_block<Sum>(mine);
  const auto sums = row.sum([=](float y) { return Two<float>{expf(y - top), y - top}; });
  const float log_sum = logf(sums.first), logsumexp = top + log_sum;
  const float everywhere = r.label_smoothing / static_cast<float>(r.columns), there = 1.f - r.label_smoothing;
  if (threadIdx.x == 0) {
    const float smooth = r.label_smoothing == 0 ? 0.f : everywhere * sums.second;
    r.loss[index] = log_sum - there * (of_target - top) - smooth + r.z_loss * logsumexp * logsumexp;
  }
  if (!r.gradient) return;
  const float factor = (1.f + 2.f * r.z_loss * logsumexp) / sums.first;
  row.for_each([=](int64_t i, float(&y)[pack]) {
    float x[pack], gradient[pack];
    load<pack>(logits + i, x);
#pragma unroll
    for (int j = 0; j < pack; ++j) {
      gradient[j] = expf(y[j] - top) * factor - everywhere - (i + j == target ? there : 0.f);
      if (cap != 0) gradient[j] *= bounded_slope(x[j] * per_cap);
    }
    store<pack>(logits + i, gradient);
  });
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
      launch(stream, cross_entropy_kernel<Element, pack>, grid(stream, r.rows), row_threads(r.columns / pack), r);
    };
    if (in_packs<Element>(r.columns, r.logits)) {
      run(Constant<kPack<Element>>{});
    } else {
      run(Constant<1>{});
    }
  });
}

}  // namespace ds_kernels::cuda
