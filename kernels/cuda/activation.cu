// Activations with bias, and gated ones. A thread has one pack of a row.
#include "activation_launch.h"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr const char* kOps[] = {"bias_activation", "gated_activation"};

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

template <Activation activation, bool gated>
void run(const ActivationRows& n, Dtype dtype, Stream stream) {
  const auto kernel_of = [](auto element, auto pack) {
    return activation_kernel<decltype(element), pack, activation, gated>;
  };
  launch_in_packs(kOps[gated], n, dtype, stream, kernel_of, n.input, n.bias, n.output);
}

template <bool gated>
void run(const ActivationRows& n, Dtype dtype, Activation activation, Stream stream) {
  switch (activation) {
    case Activation::Relu: return run<Activation::Relu, gated>(n, dtype, stream);
    case Activation::Gelu: return run<Activation::Gelu, gated>(n, dtype, stream);
    case Activation::GeluTanh: return run<Activation::GeluTanh, gated>(n, dtype, stream);
    case Activation::Silu: return run<Activation::Silu, gated>(n, dtype, stream);
    default: return run<Activation::Identity, gated>(n, dtype, stream);
  }
}

}  // namespace

void launch_bias_activation(const ActivationRows& rows, Dtype dtype, Activation activation, Stream stream) {
  run<false>(rows, dtype, activation, stream);
}

void launch_gated_activation(const ActivationRows& rows, Dtype dtype, Activation activation, Stream stream) {
  run<true>(rows, dtype, activation, stream);
}

}  // namespace ds_kernels::cuda
