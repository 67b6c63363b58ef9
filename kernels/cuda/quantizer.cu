// Grouped quantization. A team of threads has a group: it reads it for its range and again for its levels, the second
// time from the cache. What only dequantizes has a thread for each pack.

#include <ds_kernels/quantizer.h>

#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

// ---- packs of values and levels ----------------------------------------------------------------------------------

constexpr int kLevels = 8;  // of a pack: 8 or 4 bytes

// How many elements are taken at once where addresses or sizes do not fit packs: a byte of levels.
template <int bits>
constexpr int kFew = 8 / bits;

template <int count, class Element>
__device__ __forceinline__ void load_values(const Element* from, float (&x)[count]) {
  if constexpr (count == kLevels) {
    load<count>(from, x);
  } else {
#pragma unroll
    for (int j = 0; j < count; ++j) x[j] = widen(from[j]);
  }
}
template <int count, class Element>
__device__ __forceinline__ void store_values(Element* to, const float (&x)[count]) {
  if constexpr (count == kLevels) {
    store<count>(to, x);
  } else {
#pragma unroll
    for (int j = 0; j < count; ++j) narrow(x[j], to[j]);
  }
}

// The levels from `position` on, as bytes, the first one lowest.
template <int bits, int count>
__device__ __forceinline__ uint64_t load_bytes(const void* levels, int64_t position) {
  const auto* from = static_cast<const uint8_t*>(levels) + position * bits / 8;
  if constexpr (count == kLevels && bits == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    return words.x | static_cast<uint64_t>(words.y) << 32;
  } else if constexpr (count == kLevels) {
    return bytes_of_nibbles(*reinterpret_cast<const uint32_t*>(from));
  } else {
    return bits == 8 ? *from : bytes_of_nibbles(*from);
  }
}

template <int bits, int count>
__device__ __forceinline__ void load_signed(const void* levels, int64_t position, float (&x)[count]) {
  const uint64_t bytes = load_bytes<bits, count>(levels, position);
#pragma unroll
  for (int j = 0; j < count; ++j) {
    const int level = static_cast<int>(bytes >> (8 * j) & 0xff), half = 1 << (bits - 1);
    x[j] = static_cast<float>((level ^ half) - half);
  }
}
template <int bits, int count>
__device__ __forceinline__ void load_unsigned(const void* levels, int64_t position, float (&x)[count]) {
  const uint64_t bytes = load_bytes<bits, count>(levels, position);
#pragma unroll
  for (int j = 0; j < count; ++j) x[j] = static_cast<float>(static_cast<int>(bytes >> (8 * j) & 0xff));
}

// Stores whole numbers.
template <int bits, int count>
__device__ __forceinline__ void store_levels(void* levels, int64_t position, const float (&x)[count]) {
  auto* to = static_cast<uint8_t*>(levels) + position * bits / 8;
  uint64_t bytes = 0;
#pragma unroll
  for (int j = 0; j < count; ++j) bytes |= static_cast<uint64_t>(static_cast<int>(x[j]) & 0xff) << (8 * j);
  if constexpr (count == kLevels && bits == 8) {
    *reinterpret_cast<uint2*>(to) = {static_cast<uint32_t>(bytes), static_cast<uint32_t>(bytes >> 32)};
  } else if constexpr (count == kLevels) {
    *reinterpret_cast<uint32_t*>(to) = nibbles_of_bytes(bytes);
  } else {
    *to = static_cast<uint8_t>(bits == 8 ? bytes : nibbles_of_bytes(bytes));
  }
}

// a / b; a division of 64 bits takes longer than the work.
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// ---- where values come from: `load(position in the group, x)` ------------------------------------------------------

template <class Element, int count>
struct Values {
  const Element* x;
  __device__ __forceinline__ void load(int64_t i, float (&to)[count]) const { load_values<count>(x + i, to); }
};

template <int bits, int count>
struct Received {
  const ReduceGroups& g;
  int64_t begin;

  __device__ __forceinline__ void load(int64_t i, float (&to)[count]) const {
    const int64_t position = begin + i, group = divide(position, g.received_size), sent = g.groups * g.size;
    const int64_t groups = divide(sent, g.received_size), numbers = g.as.symmetric ? 1 : 2;
#pragma unroll
    for (int j = 0; j < count; ++j) to[j] = 0;
    for (int64_t device = 0; device < g.devices; ++device) {
      const float* params = g.received_params + (device * groups + group) * numbers;
      const float step = params[0], offset = g.as.symmetric ? 0.f : params[1];
      float level[count];
      load_signed<bits>(g.received, device * sent + position, level);
#pragma unroll
      for (int j = 0; j < count; ++j) to[j] += level[j] * step + offset;
    }
  }
};

// ---- groups ------------------------------------------------------------------------------------------------------

struct Smaller {
  template <class T>
  static __device__ __forceinline__ int32_t nothing() {
    return INT32_MAX;
  }
  static __device__ __forceinline__ int32_t combine(int32_t a, int32_t b) { return a < b ? a : b; }
};

struct Range {
  float low, high;
};

// The smallest and largest value of a group of `size`; 0 and the largest magnitude if symmetric. `size` is 0 in teams
// without a group.
template <int count, class Source>
__device__ __forceinline__ Range range_of(const Team& team, const Source& source, int64_t size, bool symmetric) {
  int32_t low = INT32_MAX, high = symmetric ? 0 : INT32_MIN;
  for (int64_t i = static_cast<int64_t>(team.thread) * count; i < size; i += static_cast<int64_t>(team.size) * count) {
    float x[count];
    source.load(i, x);
#pragma unroll
    for (int j = 0; j < count; ++j) {
      const int32_t order = symmetric ? static_cast<int32_t>(bits_of(x[j]) & 0x7fffffffu) : order_of(x[j]);
      low = Smaller::combine(low, order);
      high = Larger::combine(high, order);
    }
  }
  high = team.over<Larger>(high);
  if (symmetric) return {0, from_order(high)};
  low = team.over<Smaller>(low);
  return size == 0 ? Range{0, 0} : Range{from_order(low), from_order(high)};
}

// Quantizes a group to `levels`, from `place` on.
template <int bits, int count, class Source>
__device__ __forceinline__ void quantize_group(const Team& team, const Source& source, int64_t size, bool symmetric,
                                               void* levels, int64_t place, float* params) {
  const Range range = range_of<count>(team, source, size, symmetric);
  const float span = symmetric ? 2 * range.high : range.high - range.low;
  const Quantization q = quantization(span, symmetric ? 0.f : (range.high + range.low) / 2, bits);
  for (int64_t i = static_cast<int64_t>(team.thread) * count; i < size; i += static_cast<int64_t>(team.size) * count) {
    float x[count];
    source.load(i, x);
#pragma unroll
    for (int j = 0; j < count; ++j) x[j] = quantized(x[j], q);
    store_levels<bits>(levels, place + i, x);
  }
  if (!params || team.thread != 0) return;
  params[0] = 1 / q.scale;
  if (!symmetric) params[1] = q.offset;
}

template <class Element, int bits, int count>
__global__ void __launch_bounds__(kMaxTeam) quantize_kernel(const QuantizeGroups g, const int team_size) {
  const Team team(team_size);
  const bool has_group = team.row < g.groups;
  const Values<Element, count> values{static_cast<const Element*>(g.x) + (has_group ? team.row * g.size : 0)};
  const int64_t place = has_group ? place_of(g.swizzle, team.row) : 0;
  float* params = has_group ? g.params + place * (g.as.symmetric ? 1 : 2) : nullptr;
  quantize_group<bits, count>(team, values, has_group ? g.size : 0, g.as.symmetric, g.levels, place * g.size, params);
}

template <int bits, int count>
__global__ void __launch_bounds__(kMaxTeam) reduce_kernel(const ReduceGroups g, const int team_size) {
  const Team team(team_size);
  const bool has_group = team.row < g.groups;
  const int64_t begin = has_group ? team.row * g.size : 0;
  float* params = has_group ? g.params + team.row * (g.as.symmetric ? 1 : 2) : nullptr;
  quantize_group<bits, count>(team, Received<bits, count>{g, begin}, has_group ? g.size : 0, g.as.symmetric, g.levels,
                              begin, params);
}

template <class Element, int bits, int count>
__global__ void dequantize_kernel(const DequantizeGroups g, const unsigned blocks_of_group) {
  const auto [group, i] = Place(blocks_of_group, count);
  if (i >= g.size) return;
  const float* params = g.params + group * (g.as.symmetric ? 1 : 2);
  const float step = params[0], offset = g.as.symmetric ? 0.f : params[1];
  float x[count];
  load_signed<bits>(g.levels, group * g.size + i, x);
#pragma unroll
  for (int j = 0; j < count; ++j) x[j] = g.as.symmetric ? x[j] * step : x[j] * step + offset;
  store_values(static_cast<Element*>(g.x) + group * g.size + i, x);
}

template <class Element, int bits, int count>
__global__ void dequantize_range_kernel(const DequantizeRangeGroups g, const unsigned blocks_of_group) {
  const auto [group, i] = Place(blocks_of_group, count);
  if (i >= g.size) return;
  const float divisor = widen(static_cast<const Element*>(g.scale)[group]);
  const float least = widen(static_cast<const Element*>(g.minimum)[group]);
  float x[count];
  load_unsigned<bits>(g.levels, group * g.size + i, x);
#pragma unroll
  for (int j = 0; j < count; ++j) x[j] = x[j] / divisor + least;
  store_values(static_cast<Element*>(g.x) + group * g.size + i, x);
}

// r(v) = floor(v + noise), or to nearest without noise.
__device__ __forceinline__ float rounded(float v, const float* noise, int64_t i) {
  return noise ? floorf(v + noise[i]) : rintf(v);
}

template <class Element, int count>
__global__ void __launch_bounds__(kMaxTeam) fake_quantize_kernel(const FakeQuantizeGroups g, const int team_size) {
  const Team team(team_size);
  const bool has_group = team.row < g.groups;
  const int64_t begin = has_group ? team.row * g.size : 0, size = has_group ? g.size : 0;
  auto* at = static_cast<Element*>(g.x) + begin;
  const Range range = range_of<count>(team, Values<Element, count>{at}, size, g.symmetric);
  const float* noise = g.noise ? g.noise + begin : nullptr;
  const float levels = static_cast<float>(1 << g.bits);
  const float scale = levels / ((g.symmetric ? 2 * range.high : range.high - range.low) + 1e-5f), step = 1 / scale;
  // Each thread writes what it alone has read again.
  for (int64_t i = static_cast<int64_t>(team.thread) * count; i < size; i += static_cast<int64_t>(team.size) * count) {
    float x[count];
    load_values<count>(at + i, x);
#pragma unroll
    for (int j = 0; j < count; ++j) {
      float level = rounded((x[j] - range.low) * scale, noise, i + j);
      if (g.symmetric) level = clamp(level, -levels / 2, levels / 2 - 1);
      x[j] = level * step + range.low;
    }
    store_values(at + i, x);
  }
}

// ---- launches ----------------------------------------------------------------------------------------------------

// Calls `with(bits, count)`, of whose arguments the types count.
template <class With>
void with_levels(int bits, bool packed, const With& with) {
  if (bits == 8) return packed ? with(Constant<8>{}, Constant<kLevels>{}) : with(Constant<8>{}, Constant<kFew<8>>{});
  return packed ? with(Constant<4>{}, Constant<kLevels>{}) : with(Constant<4>{}, Constant<kFew<4>>{});
}

template <class... Pointers>
bool fit_packs(int64_t size, Pointers... pointers) {
  return size % kLevels == 0 && (is_aligned(pointers) && ...);
}

}  // namespace

template <>
void compute(const QuantizeGroups& g, Dtype dtype, const Stream& stream) {
  with_levels(g.as.bits, fit_packs(g.size, g.x, g.levels), [&](auto bits, auto count) {
    with_element(dtype, [&](auto element) {
      const Teams teams(g.size / count);
      launch(stream, quantize_kernel<decltype(element), bits, count>, teams.blocks(stream, g.groups), teams.threads, g,
             teams.size);
    });
  });
}

template <>
void compute(const ReduceGroups& g, Dtype, const Stream& stream) {
  const bool packed = fit_packs(g.size, g.received, g.levels) && g.received_size % kLevels == 0;
  with_levels(g.as.bits, packed, [&](auto bits, auto count) {
    const Teams teams(g.size / count);
    launch(stream, reduce_kernel<bits, count>, teams.blocks(stream, g.groups), teams.threads, g, teams.size);
  });
}

template <>
void compute(const DequantizeGroups& g, Dtype dtype, const Stream& stream) {
  if (g.size == 0) return;
  with_levels(g.as.bits, fit_packs(g.size, g.levels, g.x), [&](auto bits, auto count) {
    with_element(dtype, [&](auto element) {
      const Share share(g.size / count);
      launch(stream, dequantize_kernel<decltype(element), bits, count>, share.blocks(stream, g.groups), share.threads,
             g, share.blocks_of_row);
    });
  });
}

template <>
void compute(const DequantizeRangeGroups& g, Dtype dtype, const Stream& stream) {
  if (g.size == 0) return;
  with_levels(g.bits, fit_packs(g.size, g.levels, g.x), [&](auto bits, auto count) {
    with_element(dtype, [&](auto element) {
      const Share share(g.size / count);
      launch(stream, dequantize_range_kernel<decltype(element), bits, count>, share.blocks(stream, g.groups),
             share.threads, g, share.blocks_of_row);
    });
  });
}

template <>
void compute(const FakeQuantizeGroups& g, Dtype dtype, const Stream& stream) {
  if (g.size == 0) return;
  with_element(dtype, [&](auto element) {
    const auto run = [&](auto count) {
      const Teams teams(g.size / count);
      launch(stream, fake_quantize_kernel<decltype(element), count>, teams.blocks(stream, g.groups), teams.threads, g,
             teams.size);
    };
    fit_packs(g.size, g.x) ? run(Constant<kLevels>{}) : run(Constant<1>{});
  });
}

}  // namespace ds_kernels::cuda
