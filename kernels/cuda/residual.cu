// Additions to a residual. A thread has one pack of a row.
#include <ds_kernels/residual.h>

#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

template <class Element, int pack>
__global__ void add_bias_kernel(const ResidualRows r, const unsigned blocks_of_row) {
  const auto [row, column] = Place(blocks_of_row, pack);
  if (column >= r.columns) return;
  const int64_t position = row * r.columns + column;
  float scaled[pack] = {}, sum[pack] = {};
  add<Element>(r.residual, position, scaled);
  add<Element>(r.hidden, position, sum);
  if (r.scale_attention) {
    add<Element>(r.attention, position, scaled);
  } else {
    add<Element>(r.attention, position, sum);
  }
  add<Element>(r.attention_bias, column, scaled);
  add<Element>(r.final_bias, column, scaled);
#pragma unroll
  for (int j = 0; j < pack; ++j) sum[j] += r.scale * scaled[j];
  store<pack>(static_cast<Element*>(r.residual) + position, sum);
}

template <class Element, int pack>
__global__ void mix_kernel(const MixRows r, const unsigned blocks_of_row) {
  const auto [row, column] = Place(blocks_of_row, pack);
  if (column >= r.columns) return;
  auto* output = static_cast<Element*>(r.output) + row * r.columns + column;
  float x[pack], y[pack], a[pack], b[pack];
  load<pack>(output, x);
  load<pack>(static_cast<const Element*>(r.residual) + row * r.columns + column, y);
  load<pack>(static_cast<const Element*>(r.output_weight) + column, a);
  load<pack>(static_cast<const Element*>(r.residual_weight) + column, b);
#pragma unroll
  for (int j = 0; j < pack; ++j) x[j] = x[j] * a[j] + y[j] * b[j];
  store<pack>(output, x);
}

}  // namespace

template <>
void compute(const ResidualRows& r, Dtype dtype, const Stream& stream) {
  const auto kernel_of = [](auto element, auto pack) { return add_bias_kernel<decltype(element), pack>; };
  launch_in_packs(stream, r, dtype, kernel_of, r.residual, r.hidden, r.attention, r.attention_bias, r.final_bias);
}

template <>
void compute(const MixRows& r, Dtype dtype, const Stream& stream) {
  const auto kernel_of = [](auto element, auto pack) { return mix_kernel<decltype(element), pack>; };
  launch_in_packs(stream, r, dtype, kernel_of, r.output, r.residual, r.output_weight, r.residual_weight);
}

}  // namespace ds_kernels::cuda
