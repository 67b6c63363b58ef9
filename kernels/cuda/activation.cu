// Activations with bias, and gated ones. A thread has one pack of a row.
#include <ds_kernels/activation.h>

#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

// A pack of input, with the bias of its columns.
template <class Element, int pack>
__device__ __forceinline__ void biased(const ActivationRows& n, int64_t position, int64_t column, float (&x)[pack]) {
  load<pack>(static_cast<const Element*>(n.input) + position, x);
  if (!n.bias) return;
  float bias[pack];
  load<pack>(static_cast<const Element*>(n.bias) + column, bias);
#pragma unroll
  for (int j = 0; j < pack; ++j) x[j] += bias[j];
}

template <class Element, int pack, Activation activation, bool gated>
__global__ void activation_kernel(const ActivationRows n, const unsigned blocks_of_row) {
  const auto [row, column] = Place(blocks_of_row, pack);
  if (column >= n.columns) return;
  float x[pack], y[pack];
  if constexpr (gated) {
    float gate[pack];
    biased<Element, pack>(n, row * 2 * n.columns + column, column, x);
    biased<Element, pack>(n, (row * 2 + 1) * n.columns + column, n.columns + column, gate);
#pragma unroll
    for (int j = 0; j < pack; ++j) y[j] = x[j] * activate<activation>(gate[j]);
  } else {
    biased<Element, pack>(n, row * n.columns + column, column, x);
#pragma unroll
    for (int j = 0; j < pack; ++j) y[j] = activate<activation>(x[j]);
  }
  store<pack>(static_cast<Element*>(n.output) + row * n.columns + column, y);
}

template <bool gated>
void launch_activation(const ActivationRows& n, Dtype dtype, const Stream& stream) {
  with_activation(n.activation, [&](auto activation) {
    const auto kernel_of = [](auto element, auto pack) {
      return activation_kernel<decltype(element), pack, decltype(activation)::value, gated>;
    };
    launch_in_packs(stream, n, dtype, kernel_of, n.input, n.bias, n.output);
  });
}

}  // namespace

template <>
void compute(const ActivationRows& n, Dtype dtype, const Stream& stream) {
  n.gated ? launch_activation<true>(n, dtype, stream) : launch_activation<false>(n, dtype, stream);
}

}  // namespace ds_kernels::cuda
