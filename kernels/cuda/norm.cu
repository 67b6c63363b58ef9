// Layer norm and RMS norm, a block for each row.
//
// A row is gathered into registers. One pass gives its mean, another its variance and what rounding took from the mean,
// for which both are corrected (Chan, Golub & LeVeque 1983): rows far from zero lose no digits.
#include <ds_kernels/norm.h>

#include "launch.cuh"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

template <class Element, int pack, bool centred>
__global__ void __launch_bounds__(kMaxRowThreads) norm_kernel(const NormRows n) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * n.columns;
  const auto* input = static_cast<const Element*>(n.input) + begin;
  const auto* residual = n.residual ? static_cast<const Element*>(n.residual) + begin : nullptr;
  const auto* input_bias = static_cast<const Element*>(n.input_bias);
  const auto gather = [=](int64_t i, float(&x)[pack]) {
    float more[pack];
    load<pack>(input + i, x);
    if (residual) {
      load<pack>(residual + i, more);
#pragma unroll
      for (int j = 0; j < pack; ++j) x[j] += more[j];
    }
    if (input_bias) {
      load<pack>(input_bias + i, more);
#pragma unroll
      for (int j = 0; j < pack; ++j) x[j] += more[j];
    }
  };
  Row<pack, decltype(gather)> row(n.columns, gather);
  if (n.sum) {
    auto* sum = static_cast<Element*>(n.sum) + begin;
    row.for_each([=](int64_t i, float(&x)[pack]) { store<pack>(sum + i, x); });
  }
  const float count = static_cast<float>(n.columns);
  float centre = 0, factor, shift = 0;
  if (centred) {
    centre = row.sum([](float x) { return x; }) / count;
    const auto sums = row.sum([=](float x) { return Two<float>{x - centre, (x - centre) * (x - centre)}; });
    const float error = sums.first / count;
    factor = 1.f / sqrtf(sums.second / count - error * error + n.eps);
    shift = -error * factor;
  } else {
    factor = 1.f / sqrtf(row.sum([](float x) { return x * x; }) / count + n.eps);
  }
  const auto* weight = static_cast<const Element*>(n.weight);
  const auto* bias = static_cast<const Element*>(n.bias);
  auto* output = static_cast<Element*>(n.output) + begin;
  row.for_each([=](int64_t i, float(&x)[pack]) {
    float w[pack], b[pack] = {}, y[pack];
    load<pack>(weight + i, w);
    if (bias) load<pack>(bias + i, b);
#pragma unroll
    for (int j = 0; j < pack; ++j) y[j] = ((x[j] - centre) * factor + shift) * (w[j] + n.weight_offset) + b[j];
    store<pack>(output + i, y);
  });
}

template <bool centred>
void norm(const NormRows& n, Dtype dtype, const Stream& stream) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto run = [&](auto pack) {
      launch(stream, norm_kernel<Element, pack, centred>, grid(stream, n.rows), row_threads(n.columns / pack), n);
    };
    if (in_packs<Element>(n.columns, n.input, n.residual, n.input_bias, n.weight, n.bias, n.output, n.sum)) {
      run(Constant<kPack<Element>>{});
    } else {
      run(Constant<1>{});
    }
  });
}

}  // namespace

template <>
void compute(const NormRows& n, Dtype dtype, const Stream& stream) {
  if (n.columns == 0) return;
  n.centred ? norm<true>(n, dtype, stream) : norm<false>(n, dtype, stream);
}

}  // namespace ds_kernels::cuda
