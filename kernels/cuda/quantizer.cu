// Grouped quantization. A team of threads has a group, whose values it keeps in registers between their range and their
// levels; those of groups too long for that it reads twice, the second time from the cache. What only dequantizes has a
// thread for each pack.

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

// Four bytes, the lowest of each word.
__device__ __forceinline__ uint32_t four_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Stores levels, of which only the lowest bits count.
template <int bits, int count>
__device__ __forceinline__ void store_levels(void* levels, int64_t position, const uint32_t (&level)[count]) {
  constexpr int kBytes = count * bits / 8;
  auto* to = static_cast<uint8_t*>(levels) + (position * bits >> 3);
  uint32_t bytes[kBytes];
#pragma unroll
  for (int j = 0; j < kBytes; ++j) {
    if constexpr (bits == 8) {
      bytes[j] = level[j];
    } else {
      bytes[j] = level[2 * j] << 4 | (level[2 * j + 1] & 15u);
    }
  }
  if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(to) = {four_bytes(bytes[0], bytes[1], bytes[2], bytes[3]),
                                     four_bytes(bytes[4], bytes[5], bytes[6], bytes[7])};
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = four_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
  } else {
    *to = static_cast<uint8_t>(bytes[0]);
  }
}

// The levels of values in the lowest bits of words, as `quantized` has them.
template <int count>
__device__ __forceinline__ void levels_of(const float (&x)[count], const Quantization& q, uint32_t (&level)[count]) {
  float at[count];
#pragma unroll
  for (int j = 0; j < count; ++j) at[j] = (x[j] - q.offset) * q.scale;
  // Only of a scale that is no positive number are there NaNs.
  if (!(q.scale > 0 && q.scale < __builtin_huge_valf())) {
#pragma unroll
    for (int j = 0; j < count; ++j) at[j] = at[j] == at[j] ? at[j] : 0.f;
  }
#pragma unroll
  for (int j = 0; j < count; ++j) level[j] = bits_of(fmaxf(q.low, fminf(q.high, at[j])) + kWhole);
}

// a / b; a division of 64 bits takes longer than the work.
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}
struct ShortDivision {
  __device__ __forceinline__ int64_t operator()(int64_t a, int64_t b) const { return divide(a, b); }
};

// ---- where values come from: `load(position in the group, x)` ------------------------------------------------------
//
// A thread keeps `kHeld` packs of type `Held`.

template <class Element, int count>
struct Values {
  const Element* x;
  __device__ __forceinline__ void load(int64_t i, float (&to)[count]) const { load_values<count>(x + i, to); }

  static constexpr int kHeld = 8 / sizeof(Element);  // 64 bytes
  using Held = Words<Element, kLevels>;
  __device__ __forceinline__ void hold(int64_t i, Held& held) const { held.load_from(x + i); }
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

  static constexpr int kHeld = 2;
  using Held = Words<float, kLevels>;
  __device__ __forceinline__ void hold(int64_t i, Held& held) const {
    float sums[kLevels];
    load(i, sums);
#pragma unroll
    for (int j = 0; j < kLevels; ++j) held.words[j] = bits_of(sums[j]);
  }
};

// A team's group, read whenever it is asked for. `size` is 0 in teams without a group.
template <class Source, int count>
class ReadGroup {
 public:
  __device__ __forceinline__ ReadGroup(const Team& team, const Source& source, int64_t size)
      : team_(team), source_(source), size_(size) {}

  // Calls `body(position, values)` for what the calling thread has.
  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
    const int64_t step = static_cast<int64_t>(team_.size) * count;
    for (int64_t i = static_cast<int64_t>(team_.thread) * count; i < size_; i += step) {
      float x[count];
      source_.load(i, x);
      body(i, x);
    }
  }

  // The largest magnitude the calling thread has, as a whole number in the same order.
  __device__ __forceinline__ int32_t magnitude() const {
    int32_t most = 0;
    for_each([&](int64_t, const float(&x)[count]) {
#pragma unroll
      for (int j = 0; j < count; ++j) most = Larger::combine(most, static_cast<int32_t>(bits_of(x[j]) & 0x7fffffffu));
    });
    return most;
  }

 private:
  const Team& team_;
  const Source source_;
  const int64_t size_;
};

// The same, read once and kept in registers.
template <class Source>
class HeldGroup {
 public:
  __device__ __forceinline__ HeldGroup(const Team& team, const Source& source, int64_t size)
      : team_(team), packs_(static_cast<int>(size / kLevels)) {
#pragma unroll
    for (int k = 0; k < Source::kHeld; ++k) {
      if (index(k) < packs_) source.hold(position(k), held_[k]);
    }
  }

  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
#pragma unroll
    for (int k = 0; k < Source::kHeld; ++k) {
      if (index(k) >= packs_) continue;
      float x[kLevels];
      held_[k].widen_to(x);
      body(position(k), x);
    }
  }

  __device__ __forceinline__ int32_t magnitude() const {
    int32_t most = 0, least = 0;  // `least`: of the lower halves of words
#pragma unroll
    for (int k = 0; k < Source::kHeld; ++k) {
      if (index(k) >= packs_) continue;
#pragma unroll
      for (const uint32_t word : held_[k].words) {
        most = Larger::combine(most, static_cast<int32_t>(word & 0x7fffffffu));
        if constexpr (kHalves) least = Larger::combine(least, static_cast<int32_t>(word & 0x7fffu));
      }
    }
    if constexpr (!kHalves) return most;
    // Magnitudes of half precision are in the order of their bits, too.
    Held one{};
    one.words[0] = static_cast<uint32_t>(Larger::combine(most >> 16, least));
    float x[kLevels];
    one.widen_to(x);
    return static_cast<int32_t>(bits_of(x[0]));
  }

 private:
  using Held = typename Source::Held;
  static constexpr bool kHalves = sizeof(Held) == 2 * kLevels;

  __device__ __forceinline__ int index(int k) const { return team_.thread + k * team_.size; }
  __device__ __forceinline__ int64_t position(int k) const { return static_cast<int64_t>(index(k)) * kLevels; }

  const Team& team_;
  const int packs_;
  Held held_[Source::kHeld];
};

template <class Source, int count, bool held>
using Group = std::conditional_t<held, HeldGroup<Source>, ReadGroup<Source, count>>;

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

// The smallest and largest value of a group; 0 and the largest magnitude if symmetric.
template <class Group>
__device__ __forceinline__ Range range_of(const Team& team, const Group& group, bool has_values, bool symmetric) {
  if (symmetric) return {0, from_order(team.over<Larger>(group.magnitude()))};
  int32_t low = INT32_MAX, high = INT32_MIN;
  group.for_each([&](int64_t, const auto& x) {
#pragma unroll
    for (const float value : x) {
      const int32_t order = order_of(value);
      low = Smaller::combine(low, order);
      high = Larger::combine(high, order);
    }
  });
  high = team.over<Larger>(high);
  low = team.over<Smaller>(low);
  return has_values ? Range{from_order(low), from_order(high)} : Range{0, 0};
}

// Quantizes a group to `levels`, from `place` on.
template <int bits, int count, class Group>
__device__ __forceinline__ void quantize_group(const Team& team, const Group& group, bool has_values, bool symmetric,
                                               void* levels, int64_t place, float* params) {
  const Range range = range_of(team, group, has_values, symmetric);
  const float span = symmetric ? 2 * range.high : range.high - range.low;
  const Quantization q = quantization(span, symmetric ? 0.f : (range.high + range.low) / 2, bits);
  group.for_each([&](int64_t i, const float(&x)[count]) {
    uint32_t level[count];
    levels_of(x, q, level);
    store_levels<bits>(levels, place + i, level);
  });
  if (!params || team.thread != 0) return;
  params[0] = 1 / q.scale;
  if (!symmetric) params[1] = q.offset;
}

template <class Element, int bits, int count, bool held>
__global__ void __launch_bounds__(kMaxTeam) quantize_kernel(const QuantizeGroups g, const int team_size) {
  using Source = Values<Element, count>;
  const Team team(team_size);
  const bool has_group = team.row < g.groups;
  const Source values{static_cast<const Element*>(g.x) + (has_group ? team.row * g.size : 0)};
  const Group<Source, count, held> group(team, values, has_group ? g.size : 0);
  const int64_t place = has_group ? place_of(g.swizzle, team.row, ShortDivision{}) : 0;
  float* params = has_group ? g.params + place * (g.as.symmetric ? 1 : 2) : nullptr;
  quantize_group<bits, count>(team, group, has_group && g.size > 0, g.as.symmetric, g.levels, place * g.size, params);
}

template <int bits, int count, bool held>
__global__ void __launch_bounds__(kMaxTeam) reduce_kernel(const ReduceGroups g, const int team_size) {
  using Source = Received<bits, count>;
  const Team team(team_size);
  const bool has_group = team.row < g.groups;
  const int64_t begin = has_group ? team.row * g.size : 0;
  const Group<Source, count, held> group(team, Source{g, begin}, has_group ? g.size : 0);
  float* params = has_group ? g.params + team.row * (g.as.symmetric ? 1 : 2) : nullptr;
  quantize_group<bits, count>(team, group, has_group && g.size > 0, g.as.symmetric, g.levels, begin, params);
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

template <class Element, int count, bool held>
__global__ void __launch_bounds__(kMaxTeam) fake_quantize_kernel(const FakeQuantizeGroups g, const int team_size) {
  using Source = Values<Element, count>;
  const Team team(team_size);
  const bool has_group = team.row < g.groups;
  const int64_t begin = has_group ? team.row * g.size : 0;
  auto* at = static_cast<Element*>(g.x) + begin;
  const Group<Source, count, held> group(team, Source{at}, has_group ? g.size : 0);
  const Range range = range_of(team, group, has_group, g.symmetric);
  const float* noise = g.noise ? g.noise + begin : nullptr;
  const float levels = static_cast<float>(1 << g.bits);
  const float scale = levels / ((g.symmetric ? 2 * range.high : range.high - range.low) + 1e-5f), step = 1 / scale;
  // Each thread writes what it alone reads.
  group.for_each([&](int64_t i, float(&x)[count]) {
#pragma unroll
    for (int j = 0; j < count; ++j) {
      float level = rounded((x[j] - range.low) * scale, noise, i + j);
      if (g.symmetric) level = clamp(level, -levels / 2, levels / 2 - 1);
      x[j] = level * step + range.low;
    }
    store_values(at + i, x);
  });
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

// Calls `with(teams, held)` for groups of `size` elements, of whose arguments the second one's type counts: whether
// teams keep them in registers.
template <class Source, int count, class With>
void with_teams(int64_t size, const With& with) {
  if constexpr (count == kLevels) {
    const int64_t each = (size / kLevels + Source::kHeld - 1) / Source::kHeld;
    if (each <= kMaxTeam) return with(Teams(each), std::true_type{});
  }
  with(Teams(size / count), std::false_type{});
}

template <>
void compute(const QuantizeGroups& g, Dtype dtype, const Stream& stream) {
  with_levels(g.as.bits, fit_packs(g.size, g.x, g.levels), [&](auto bits, auto count) {
    with_element(dtype, [&](auto element) {
      using Element = decltype(element);
      with_teams<Values<Element, count>, count>(g.size, [&](const Teams& teams, auto held) {
        launch(stream, quantize_kernel<Element, bits, count, held>, teams.blocks(stream, g.groups), teams.threads, g,
               teams.size);
      });
    });
  });
}

template <>
void compute(const ReduceGroups& g, Dtype, const Stream& stream) {
  const bool packed = fit_packs(g.size, g.received, g.levels) && g.received_size % kLevels == 0;
  with_levels(g.as.bits, packed, [&](auto bits, auto count) {
    with_teams<Received<bits, count>, count>(g.size, [&](const Teams& teams, auto held) {
      launch(stream, reduce_kernel<bits, count, held>, teams.blocks(stream, g.groups), teams.threads, g, teams.size);
    });
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
    using Element = decltype(element);
    const auto run = [&](auto count) {
      with_teams<Values<Element, count>, count>(g.size, [&](const Teams& teams, auto held) {
        launch(stream, fake_quantize_kernel<Element, count, held>, teams.blocks(stream, g.groups), teams.threads, g,
               teams.size);
      });
    };
    fit_packs(g.size, g.x) ? run(Constant<kLevels>{}) : run(Constant<1>{});
  });
}

}  // namespace ds_kernels::cuda
