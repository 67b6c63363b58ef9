// Softmax of attention scores, a team of threads for each row.
#include <ds_kernels/softmax.h>

#include "launch.cuh"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

template <class Element>
__device__ __forceinline__ const Element* added_row(const Added& added, int64_t batch, int64_t head, int64_t query) {
  if (!added.data) return nullptr;
  return static_cast<const Element*>(added.data) + batch * added.batch + head * added.head + query * added.query;
}

struct ScoresRow {
  int64_t batch, head, query;
};

template <class Index>
__device__ __forceinline__ ScoresRow split(Index row, const Scores& s) {
  const Index queries = static_cast<Index>(s.queries), heads = static_cast<Index>(s.heads);
  const Index matrix = row / queries, batch = matrix / heads;
  return {static_cast<int64_t>(batch), static_cast<int64_t>(matrix - batch * heads),
          static_cast<int64_t>(row - matrix * queries)};
}

// Divisions of 64 bits take longer than the work.
__device__ __forceinline__ ScoresRow scores_row(int64_t row, int64_t rows, const Scores& s) {
  return rows <= 0xffffffff ? split(static_cast<uint32_t>(row), s) : split(row, s);
}

template <class Element, class AddedElement, int pack, bool fits>
__global__ void __launch_bounds__(kMaxRowThreads) softmax_kernel(const Scores s, const int64_t rows,
                                                                 const int team_size) {
  const Team team(team_size);
  const bool has_row = team.row < rows;
  const AddedElement *mask = nullptr, *alibi = nullptr;
  // Keys outside of [begin, end) take no part: their results are zero, unless the row has a NaN.
  int64_t begin = 0, end = s.keys;
  if (s.causal || s.window != 0 || s.mask.data || s.alibi.data) {
    const auto [batch, head, query] = scores_row(has_row ? team.row : 0, rows, s);
    const int64_t position = s.keys - s.queries + query;
    const int64_t last = position + 1 < 0 ? 0 : position + 1 < s.keys ? position + 1 : s.keys;
    if (s.causal) end = last;
    const int64_t seen = position + 1 - s.window;
    if (s.window != 0 && seen >= 0) begin = seen < end ? seen : end;
    mask = added_row<AddedElement>(s.mask, batch, head, query);
    alibi = added_row<AddedElement>(s.alibi, batch, head, query);
  }
  const auto* input = row_of<Element>(s.input, team.row, s.keys);
  const float scale = s.scale;
  const auto read = [=](int64_t i, Words<Element, pack>& words) {
    if (i < end && i + pack > begin) words.load_from(input + i);
  };
  const auto prepare = [=](int64_t i, const Words<Element, pack>& words, float(&x)[pack]) {
    const bool all = i >= begin && i + pack <= end, none = i >= end || i + pack <= begin;
    if (!none) {
      words.widen_to(x);
#pragma unroll
      for (int j = 0; j < pack; ++j) x[j] *= scale;
      add<AddedElement>(mask, i, x);
      add<AddedElement>(alibi, i, x);
    }
    if (all) return;
#pragma unroll
    for (int j = 0; j < pack; ++j) x[j] = i + j < begin || i + j >= end ? -kInfinity : x[j];
  };
  const auto gather = [=](int64_t i, float(&x)[pack]) {
    Words<Element, pack> words{};
    read(i, words);
    prepare(i, words, x);
  };
  using Again = std::conditional_t<fits, Fits, decltype(gather)>;
  Row<pack, Again> row(team, has_row ? s.keys : 0, Again(gather));
  Words<Element, pack> words[kHeldPacks] = {};  // all are read before the first is waited for
  row.for_each_held([&](int i, int64_t position, float(&)[pack]) { read(position, words[i]); });
  row.for_each_held([&](int i, int64_t position, float(&x)[pack]) { prepare(position, words[i], x); });
  float top = -kInfinity, sum = 0;
  row.for_each([&](int64_t, float(&x)[pack]) {
#pragma unroll
    for (int j = 0; j < pack; ++j) top = Maximum::combine(top, x[j]);
  });
  top = team.over<Maximum>(top);
  // Where every score is -inf nothing takes part: the sum stays 0, and so do the results.
  const float shift = top == -kInfinity ? 0.f : top;
  const auto exponentials = [=](float(&x)[pack]) {
#pragma unroll
    for (int j = 0; j < pack; ++j) x[j] = __expf(x[j] - shift);
  };
  row.for_each([&](int64_t, float(&x)[pack]) {
    exponentials(x);
#pragma unroll
    for (int j = 0; j < pack; ++j) sum += x[j];
  });
  sum = team.over<Sum>(sum);
  // If it is a NaN, so is the whole row: also the zeros of keys that take no part.
  const float factor = sum == 0 ? 0.f : 1.f / sum;
  auto* output = row_of<Element>(s.output, team.row, s.keys);
  row.for_each(exponentials, [=](int64_t i, float(&x)[pack]) {
#pragma unroll
    for (int j = 0; j < pack; ++j) x[j] *= factor;
    store<pack>(output + i, x);
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
  // Long rows in packs of the mask: eight of its floats at once would not find room in registers.
  with_row<Element, kPack<AddedElement>>(s.keys, in_packs(s, kPack<Element>), [&](auto pack, auto fits) {
    const Teams teams = row_teams(s.keys / pack);
    const int64_t rows = s.batch * s.heads * s.queries;
    launch(stream, softmax_kernel<Element, AddedElement, pack, fits>, teams.blocks(stream, rows), teams.threads, s,
           rows, teams.size);
  });
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
