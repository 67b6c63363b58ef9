// Layer norm and RMS norm, a team of threads for each row.
//
// A row is gathered into registers. One pass gives its mean, another its variance and what rounding took from the mean,
// for which both are corrected (Chan, Golub & LeVeque 1983): rows far from zero lose no digits.
#include <ds_kernels/norm.h>

#include "launch.cuh"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

// What an element becomes before weight and bias: (x - centre) factor + shift.
struct Normal {
  float centre, factor, shift;
};

// `share` is that of an element in a mean.
template <bool centred, class Row>
__device__ __forceinline__ Normal normal_of(Row& row, const NormRows& n, float share) {
  if constexpr (centred) {
    const float centre = row.sum([](float x) { return x; }) * share;
    const auto sums = row.sum([=](float x) { return Two<float>{x - centre, (x - centre) * (x - centre)}; });
    const float error = sums.first * share, variance = sums.second * share - error * error;
    const float factor = rsqrtf((variance < 0.f ? 0.f : variance) + n.eps);  // rounding; a NaN stays
    return {centre, factor, -error * factor};
  } else {
    return {0.f, rsqrtf(row.sum([](float x) { return x * x; }) * share + n.eps), 0.f};
  }
}

template <int pack>
__device__ __forceinline__ void finish(const Normal& normal, const float (&weight)[pack], const float (&bias)[pack],
                                       float offset, float (&x)[pack]) {
#pragma unroll
  for (int j = 0; j < pack; ++j) {
    x[j] = ((x[j] - normal.centre) * normal.factor + normal.shift) * (weight[j] + offset) + bias[j];
  }
}

// Rows that fit in registers, of one tensor. A team has one row after the other and loads the next one before it waits
// for the sums of this one, so that the memory is busy all the time; weight and bias are read once.
template <class Element, int pack, bool centred>
__global__ void __launch_bounds__(kMaxRowThreads) norm_kernel(const NormRows n, const int team_size) {
  Team team(team_size);
  const float share = 1.f / static_cast<float>(n.columns);
  const int64_t stride = team.stride();
  const auto* input = row_of<Element>(n.input, team.row, n.columns);
  auto* output = row_of<Element>(n.output, team.row, n.columns);
  HeldWords<Element, pack> next;
  if (team.row < n.rows) next.load_from(input, team, n.columns);
  for (; team.block_has_row(n.rows); team.row += stride, output += stride * n.columns) {
    Row<pack> row(team, team.row < n.rows ? n.columns : 0);
    row.hold(next);
    input += stride * n.columns;
    if (team.row + stride < n.rows) next.load_from(input, team, n.columns);
    const Normal normal = normal_of<centred>(row, n, share);
    HeldWords<Element, pack> weight;
    weight.load_from(static_cast<const Element*>(n.weight), team, n.columns);
    row.for_each_held([&](int i, int64_t position, float(&x)[pack]) {
      float w[pack], b[pack] = {};
      weight.packs[i].widen_to(w);
      add<Element>(n.bias, position, b);
      finish(normal, w, b, n.weight_offset, x);
      store<pack>(output + position, x);
    });
  }
}

// Rows of any length, which may be those of a sum. That a multiprocessor is to have one block keeps nvcc from spilling
// registers so that it has two.
template <class Element, int pack, bool centred, bool fits>
__global__ void __launch_bounds__(kMaxRowThreads, 1) sum_norm_kernel(const NormRows n, const int team_size) {
  const Team team(team_size);
  const auto* input = row_of<Element>(n.input, team.row, n.columns);
  const auto* residual = row_of<Element>(n.residual, team.row, n.columns);
  const auto gather = [=](int64_t i, float(&x)[pack]) {
    load<pack>(input + i, x);
    add<Element>(residual, i, x);
    add<Element>(n.input_bias, i, x);
  };
  using Again = std::conditional_t<fits, Fits, decltype(gather)>;
  Row<pack, Again> row(team, team.row < n.rows ? n.columns : 0, Again(gather));
  row.hold(gather);
  if (n.sum) {
    auto* sum = row_of<Element>(n.sum, team.row, n.columns);
    row.for_each([=](int64_t i, float(&x)[pack]) { store<pack>(sum + i, x); });
  }
  const Normal normal = normal_of<centred>(row, n, 1.f / static_cast<float>(n.columns));
  auto* output = row_of<Element>(n.output, team.row, n.columns);
  row.for_each([=](int64_t i, float(&x)[pack]) {
    float w[pack], b[pack] = {};
    load<pack>(static_cast<const Element*>(n.weight) + i, w);
    add<Element>(n.bias, i, b);
    finish(normal, w, b, n.weight_offset, x);
    store<pack>(output + i, x);
  });
}

template <bool centred>
void norm(const NormRows& n, Dtype dtype, const Stream& stream) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const bool packed =
        in_packs<Element>(n.columns, n.input, n.residual, n.input_bias, n.weight, n.bias, n.output, n.sum);
    const bool is_sum = n.residual || n.input_bias || n.sum;
    with_row<Element>(n.columns, packed, [&](auto pack, auto fits) {
      const Teams teams = row_teams(n.columns / pack);
      if constexpr (fits) {
        if (!is_sum) {
          return launch(stream, norm_kernel<Element, pack, centred>, teams.resident_blocks(stream, n.rows),
                        teams.threads, n, teams.size);
        }
      }
      launch(stream, sum_norm_kernel<Element, pack, centred, fits>, teams.blocks(stream, n.rows), teams.threads, n,
             teams.size);
    });
  });
}

}  // namespace

template <>
void compute(const NormRows& n, Dtype dtype, const Stream& stream) {
  if (n.columns == 0) return;
  n.centred ? norm<true>(n, dtype, stream) : norm<false>(n, dtype, stream);
}

}  // namespace ds_kernels::cuda
