// Biases and residuals, channels last. A thread has one pack of a row.
#include "spatial_launch.h"

#include <type_traits>

#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

// sum += elements at `from`, which may be null.
template <class Element, int pack>
__device__ __forceinline__ void add(const void* from, int64_t position, float (&sum)[pack]) {
  if (!from) return;
  float more[pack];
  load<pack>(static_cast<const Element*>(from) + position, more);
#pragma unroll
  for (int j = 0; j < pack; ++j) sum[j] += more[j];
}

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

void launch_bias_add(const char* op, const BiasRows& r, Dtype dtype, Stream stream) {
  if (r.columns == 0) return;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto run = [&](auto pack) {
      const Share share(r.columns / pack);
      launch(op, bias_add_kernel<Element, pack>, share.blocks(op, r.rows), share.threads, stream, r,
             share.blocks_of_row);
    };
    if (in_packs<Element>(r.columns, r.input, r.bias, r.other, r.other_bias, r.output)) {
      run(std::integral_constant<int, kPack<Element>>{});
    } else {
      run(std::integral_constant<int, 1>{});
    }
  });
}

}  // namespace ds_kernels::cuda
