// Biases and residuals, channels last. A thread has one pack of a row.
#include <ds_kernels/spatial.h>

#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

template <class Element, int pack>
__global__ void bias_add_kernel(const BiasRows r, const unsigned blocks_of_row) {
  const auto [row, column] = Place(blocks_of_row, pack);
  if (column >= r.columns) return;
  const int64_t position = row * r.columns + column;
  float sum[pack] = {}, second[pack] = {};
  add<Element>(r.input, position, sum);
  add<Element>(r.bias, column, sum);
  add<Element>(r.other, position, second);
  add<Element>(r.other_bias, column, second);
#pragma unroll
  for (int j = 0; j < pack; ++j) sum[j] += second[j];
  store<pack>(static_cast<Element*>(r.output) + position, sum);
}

}  // namespace

template <>
void compute(const BiasRows& r, Dtype dtype, const Stream& stream) {
  const auto kernel_of = [](auto element, auto pack) { return bias_add_kernel<decltype(element), pack>; };
  launch_in_packs(stream, r, dtype, kernel_of, r.input, r.bias, r.other, r.other_bias, r.output);
}

}  // namespace ds_kernels::cuda
