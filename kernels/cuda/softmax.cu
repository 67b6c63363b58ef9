// Softmax of attention scores, a block for each row.
#include <ds_kernels/softmax.h>

#include "launch.cuh"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

template <class Element>
__device__ __forceinline__ const Element* row_of(const Added& added, int64_t batch, int64_t head, int64_t query) {
  if (!added.data) return nullptr;
  return static_cast<const Element*>(added.data) + batch * added.batch + head * added.head + query * added.query;
}

template <class Element, class AddedElement, int pack>
__global__ void __launch_bounds__(kMaxRowThreads) softmax_kernel(const Scores s) {
  const int64_t index = blockIdx.x, query = index % s.queries;
  const int64_t head = index / s.queries % s.heads, batch = index / s.queries / s.heads;
  const int64_t position = s.keys - s.queries + query;
  // Keys outside of [begin, end) take no part: their results are zero, unless the row has a NaN.
  const int64_t last = position + 1 < 0 ? 0 : position + 1 < s.keys ? position + 1 : s.keys;
  const int64_t end = s.causal ? last : s.keys, seen = position + 1 - s.window;
  const int64_t begin = s.window == 0 || seen < 0 ? 0 : seen < end ? seen : end;
  const auto* input = static_cast<const Element*>(s.input) + index * s.keys;
  const auto* mask = row_of<AddedElement>(s.mask, batch, head, query);
  const auto* alibi = row_of<AddedElement>(s.alibi, batch, head, query);
  const float scale = s.scale;
  const auto gather = [=](int64_t i, float(&x)[pack]) {
    if (i >= end || i + pack <= begin) {
#pragma unroll
      for (int j = 0; j < pack; ++j) x[j] = -kInfinity;
      return;
    }
    load<pack>(input + i, x);
    float more[pack];
#pragma unroll
    for (int j = 0; j < pack; ++j) x[j] *= scale;
    if (mask) {
      load<pack>(mask + i, more);
#pragma unroll
      for (int j = 0; j < pack; ++j) x[j] += more[j];
    }
    if (alibi) {
      load<pack>(alibi + i, more);
#pragma unroll
      for (int j = 0; j < pack; ++j) x[j] += more[j];
    }
#pragma unroll
    for (int j = 0; j < pack; ++j) x[j] = i + j < begin || i + j >= end ? -kInfinity : x[j];
  };
  Row<pack, decltype(gather)> row(s.keys, gather);
  float top = -kInfinity;
  row.for_each([&](int64_t, float(&x)[pack]) {
#pragma unroll
    for (int j = 0; j < pack; ++j) top = Maximum::combine(top, x[j]);
  });
  top = over_block<Maximum>(top);
  // Where every score is -inf nothing takes part: the sum stays 0, and so do the results.
  const float shift = top == -kInfinity ? 0.f : top;
  const float sum = row.sum([=](float x) { return __expf(x - shift); });
  const float factor = sum == 0 ? 0.f : 1.f / sum;
  const float outside = factor == factor ? 0.f : factor;  // a NaN reaches the whole row
  auto* output = static_cast<Element*>(s.output) + index * s.keys;
  row.for_each([=](int64_t i, float(&x)[pack]) {
    float y[pack];
#pragma unroll
    for (int j = 0; j < pack; ++j) y[j] = i + j < begin || i + j >= end ? outside : __expf(x[j] - shift) * factor;
    store<pack>(output + i, y);
  });
}

bool in_packs(const Scores& s, int pack) {
  const auto fits = [&](const Added& added) {
    return is_aligned(added.data) && added.batch % pack == 0 && added.head % pack == 0 && added.query % pack == 0;
  };
  return s.keys % pack == 0 && is_aligned(s.input) && is_aligned(s.output) && fits(s.mask) && fits(s.alibi);
}

template <class Element, class AddedElement>
void launch_softmax(const Scores& s, const Stream& stream) {
  const auto run = [&](auto pack) {
    launch(stream, softmax_kernel<Element, AddedElement, pack>, grid(stream, s.batch * s.heads * s.queries),
           row_threads(s.keys / pack), s);
  };
  if (in_packs(s, kPack<Element>)) {
    run(Constant<kPack<Element>>{});
  } else {
    run(Constant<1>{});
  }
}

}  // namespace

template <>
void compute(const Scores& scores, Dtype dtype, const Stream& stream) {
  if (scores.keys == 0) return;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    return scores.float_mask ? launch_softmax<Element, float>(scores, stream)
                             : launch_softmax<Element, Element>(scores, stream);
  });
}

}  // namespace ds_kernels::cuda
