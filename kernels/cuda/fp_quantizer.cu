// Quantization to small floating-point numbers. A team of threads has a group: it reads it for its range and again for
// its numbers, the second time from the cache. A thread has eight elements, whose numbers are whole bytes.

#include <ds_kernels/fp_quantizer.h>

#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

template <bool packed, class Element>
__device__ __forceinline__ void load_eight(const Element* from, float (&x)[kNumbers]) {
  if constexpr (packed) {
    load<kNumbers>(from, x);
  } else {
#pragma unroll
    for (int j = 0; j < kNumbers; ++j) x[j] = widen(from[j]);
  }
}

template <class Element, bool packed>
__global__ void __launch_bounds__(kMaxTeam) fp_quantize_kernel(const FpQuantizeGroups g, const int team_size) {
  const Team team(team_size);
  const bool has_group = team.row < g.groups;
  const int64_t begin = has_group ? team.row * g.size : 0, size = has_group ? g.size : 0;
  const auto* x = static_cast<const Element*>(g.x) + begin;
  const int64_t first = static_cast<int64_t>(team.thread) * kNumbers;
  const int64_t step = static_cast<int64_t>(team.size) * kNumbers;
  int32_t most = 0;  // magnitudes are compared as whole numbers: a NaN cannot get lost
  for (int64_t i = first; i < size; i += step) {
    float values[kNumbers];
    load_eight<packed>(x + i, values);
#pragma unroll
    for (int j = 0; j < kNumbers; ++j) {
      most = Larger::combine(most, static_cast<int32_t>(bits_of(values[j]) & 0x7fffffffu));
    }
  }
  const float largest = float_of(static_cast<uint32_t>(team.over<Larger>(most)));
  if (!has_group) return;
  const float factor = fp_factor(largest, g.format), range = static_cast<float>(1 << g.format.lost());
  auto* stored = static_cast<uint8_t*>(g.stored) + team.row * fp_row_bytes(g.size, g.format);
  for (int64_t i = first; i < size; i += step) {
    float values[kNumbers];
    load_eight<packed>(x + i, values);
    uint32_t numbers[kNumbers];
#pragma unroll
    for (int j = 0; j < kNumbers; ++j) {
      const uint32_t added =
          g.noise ? static_cast<uint32_t>(g.noise[begin + i + j] * range) : fp_half(g.format);
      numbers[j] = fp_number(values[j] * factor, added, g.format);
    }
    fp_pack(numbers, g.format.bits(), stored + i * g.format.bits() / 8);
  }
  if (team.thread == 0) fp_store_scale(largest / fp_largest(g.format), stored + g.size * g.format.bits() / 8);
}

template <class Element>
__global__ void fp_dequantize_kernel(const FpDequantizeGroups g, const unsigned blocks_of_group) {
  const auto [group, i] = Place(blocks_of_group, kNumbers);
  if (i >= g.size) return;
  const auto* stored = static_cast<const uint8_t*>(g.stored) + group * fp_row_bytes(g.size, g.format);
  const float scale = fp_load_scale(stored + g.size * g.format.bits() / 8);
  uint32_t numbers[kNumbers];
  fp_unpack(stored + i * g.format.bits() / 8, g.format.bits(), numbers);
  float values[kNumbers];
#pragma unroll
  for (int j = 0; j < kNumbers; ++j) values[j] = fp_value(numbers[j], g.format) * scale;
  store<kNumbers>(static_cast<Element*>(g.x) + group * g.size + i, values);  // memory of the op's own is aligned
}

}  // namespace

template <>
void compute(const FpQuantizeGroups& g, Dtype dtype, const Stream& stream) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const Teams teams(g.size / kNumbers);
    const auto kernel = is_aligned(g.x) ? fp_quantize_kernel<Element, true> : fp_quantize_kernel<Element, false>;
    launch(stream, kernel, teams.blocks(stream, g.groups), teams.threads, g, teams.size);
  });
}

template <>
void compute(const FpDequantizeGroups& g, Dtype dtype, const Stream& stream) {
  with_element(dtype, [&](auto element) {
    const Share share(g.size / kNumbers);
    launch(stream, fp_dequantize_kernel<decltype(element)>, share.blocks(stream, g.groups), share.threads, g,
           share.blocks_of_row);
  });
}

}  // namespace ds_kernels::cuda
