// The quantizer's loops. Compiled once per instruction-set level, without torch.
#include <ds_kernels/quantizer.h>

#include "loops.h"

namespace ds_kernels::cpu {
namespace {

// What several devices sent: each `count` levels in groups of `group`, and `params` of those.
struct Received {
  const char* levels;
  const float* params;
  int64_t devices, count, group;
};

// Where a group's values come from. `for_each(body)` calls `body(position, values, memory)` for the vectors that cover
// them; it is called twice, because recomputing a value is cheaper than keeping it.
template <class Element>
struct Values {
  const Element* x;
  int64_t count;

  template <class Body>
  DS_KERNELS_INLINE void for_each(Body body) const {
    for_each_vector(count, [from = x, &body](int64_t i, auto memory) { body(i, memory.load(from + i), memory); });
  }
};

// The sum of what several devices sent.
template <int bits, bool symmetric>
struct Sum {
  const Received& received;
  int64_t begin, end;

  template <class Body>
  DS_KERNELS_INLINE void for_each(Body body) const {
    // Groups of the sum need not be those that were sent: within a segment, they are.
    for (int64_t segment = begin, next; segment < end; segment = next) {
      const int64_t group = segment / received.group;
      next = (group + 1) * received.group < end ? (group + 1) * received.group : end;
      for_each_vector(next - segment, [&](int64_t i, auto memory) {
        body(segment - begin + i, total(segment + i, group, memory), memory);
      });
    }
  }

  template <class Memory>
  DS_KERNELS_INLINE Floats total(int64_t position, int64_t group, Memory memory) const {
    constexpr int kParams = symmetric ? 1 : 2;
    Floats sum{};
    for (int64_t device = 0; device < received.devices; ++device) {
      const char* levels = received.levels + device * (received.count * bits / 8);
      const float* params = received.params + (device * (received.count / received.group) + group) * kParams;
      const Floats value = load_signed<bits>(levels, position, memory) * params[0];
      sum += symmetric ? value : value + params[1];
    }
    return sum;
  }
};

template <bool symmetric, class Source>
DS_KERNELS_INLINE Range<symmetric> range_of(const Source& source) {
  Range<symmetric> range;
  source.for_each([&range](int64_t, Floats x, auto memory) { range.include(x, memory); });
  return range;
}

template <int bits, bool symmetric, class Source>
DS_KERNELS_INLINE void quantize_group(const Source& source, int64_t count, void* levels, float* params) {
  const Range<symmetric> range = range_of<symmetric>(source);
  const float low = range.low(), high = range.high();
  const float span = symmetric ? 2 * high : high - low;
  const Quantization q = count == 0  ? quantization(0, 0, bits)
                         : symmetric ? quantization(span, 0, bits)
                                     : quantization(span, (high + low) / 2, bits);
  params[0] = 1 / q.scale;
  if (!symmetric) params[1] = q.offset;
  source.for_each(
      [=](int64_t i, Floats x, auto memory) { store_levels<bits>(levels, i, quantized(x, q), memory); });
}

template <class Element, int bits, bool symmetric>
struct Quantize {
  static void run(const void* x, void* levels, float* params, int64_t count) {
    quantize_group<bits, symmetric>(Values<Element>{static_cast<const Element*>(x), count}, count, levels, params);
  }
};

template <int bits, bool symmetric>
void reduce(const Received& received, int64_t begin, int64_t end, void* levels, float* params) {
  const Received copy = received;
  quantize_group<bits, symmetric>(Sum<bits, symmetric>{copy, begin, end}, end - begin, levels, params);
}

template <class Element, int bits, bool symmetric>
struct Dequantize {
  static void run(const void* levels, const float* params, void* x, int64_t count) {
    auto* to = static_cast<Element*>(x);
    const float step = params[0], offset = symmetric ? 0 : params[1];
    for_each_vector(count, [=](int64_t i, auto memory) {
      const Floats value = load_signed<bits>(levels, i, memory) * step;
      memory.store(to + i, symmetric ? value : value + offset);
    });
  }
};

template <class Element, int bits, bool>
struct DequantizeRange {
  static void run(const void* levels, const void* scale, const void* minimum, void* x, int64_t count) {
    auto* to = static_cast<Element*>(x);
    const Floats divisor = one(scale), least = one(minimum);
    for_each_vector(count, [=](int64_t i, auto memory) {
      memory.store(to + i, load_unsigned<bits>(levels, i, memory) / divisor + least);
    });
  }

  static Floats one(const void* number) {
    return PartVector{1}.load(static_cast<const Element*>(number))[0] * (Floats{} + 1.f);  // 0 + -0 would be 0
  }
};

// r(v) = floor(v + noise), or to nearest without noise.
template <class Memory>
DS_KERNELS_INLINE Floats rounded(Floats v, const float* noise, Memory memory) {
  if (!noise) return round_to_even(v);
  v += memory.load(noise);
  const Floats nearest = round_to_even(v);
  return select(nearest > v, nearest - 1.f, nearest);
}

template <class Element, int, bool symmetric>
struct FakeQuantize {
  static void run(void* x, const float* noise, int64_t count, int bits) {
    auto* values = static_cast<Element*>(x);
    const Range<symmetric> range = range_of<symmetric>(Values<Element>{values, count});
    const float low = range.low(), high = range.high(), levels = static_cast<float>(1 << bits);
    const float scale = levels / ((symmetric ? 2 * high : high - low) + 1e-5f), step = 1 / scale;
    for_each_vector(count, [=](int64_t i, auto memory) {
      Floats level = rounded((memory.load(values + i) - low) * scale, noise ? noise + i : noise, memory);
      if (symmetric) level = clamp(level, -levels / 2, levels / 2 - 1);
      memory.store(values + i, level * step + low);
    });
  }
};

// From what is known at run time to the loop for it.
template <template <class, int, bool> class Loop, int bits, bool symmetric>
auto choose_for(Dtype dtype) {
  switch (dtype) {
    case Dtype::BFloat16: return Loop<BFloat16, bits, symmetric>::run;
    case Dtype::Float16: return Loop<Float16, bits, symmetric>::run;
    default: return Loop<float, bits, symmetric>::run;
  }
}
template <template <class, int, bool> class Loop>
auto choose(Dtype dtype, int bits, bool symmetric) {
  if (bits == 8) return symmetric ? choose_for<Loop, 8, true>(dtype) : choose_for<Loop, 8, false>(dtype);
  return symmetric ? choose_for<Loop, 4, true>(dtype) : choose_for<Loop, 4, false>(dtype);
}

auto choose_reduce(int bits, bool symmetric) {
  if (bits == 8) return symmetric ? reduce<8, true> : reduce<8, false>;
  return symmetric ? reduce<4, true> : reduce<4, false>;
}

// ---- groups among threads ------------------------------------------------------------------------------------------

// Calls `body(group)` for every group, which takes work on `size` elements.
template <class Body>
void for_each_group(const Threads& threads, int64_t groups, int64_t size, const Body& body) {
  share(threads, groups, grain_of((size + 1) / 2), [&](int64_t first, int64_t last) {
    for (int64_t group = first; group < last; ++group) body(group);
  });
}

// Where group number `group` begins, of so many bytes each.
const char* at(const void* groups, int64_t group, int64_t bytes) {
  return static_cast<const char*>(groups) + group * bytes;
}
char* at(void* groups, int64_t group, int64_t bytes) { return static_cast<char*>(groups) + group * bytes; }

int64_t size_of(Dtype dtype) { return dtype == Dtype::Float32 ? 4 : 2; }
int64_t bytes_of(Levels as, int64_t size) { return size * as.bits / 8; }
int64_t params_of(Levels as) { return as.symmetric ? 1 : 2; }

}  // namespace

template <>
void compute(const QuantizeGroups& g, Dtype dtype, const Threads& threads) {
  const auto loop = choose<Quantize>(dtype, g.as.bits, g.as.symmetric);
  for_each_group(threads, g.groups, g.size, [&](int64_t group) {
    const int64_t place = place_of(g.swizzle, group);
    loop(at(g.x, group, g.size * size_of(dtype)), at(g.levels, place, bytes_of(g.as, g.size)),
         g.params + place * params_of(g.as), g.size);
  });
}

template <>
void compute(const DequantizeGroups& g, Dtype dtype, const Threads& threads) {
  const auto loop = choose<Dequantize>(dtype, g.as.bits, g.as.symmetric);
  for_each_group(threads, g.groups, g.size, [&](int64_t group) {
    loop(at(g.levels, group, bytes_of(g.as, g.size)), g.params + group * params_of(g.as),
         at(g.x, group, g.size * size_of(dtype)), g.size);
  });
}

template <>
void compute(const ReduceGroups& g, Dtype, const Threads& threads) {
  const auto loop = choose_reduce(g.as.bits, g.as.symmetric);
  const Received received{static_cast<const char*>(g.received), g.received_params, g.devices, g.groups * g.size,
                          g.received_size};
  for_each_group(threads, g.groups, g.size * g.devices, [&](int64_t group) {
    loop(received, group * g.size, (group + 1) * g.size, at(g.levels, group, bytes_of(g.as, g.size)),
         g.params + group * params_of(g.as));
  });
}

template <>
void compute(const DequantizeRangeGroups& g, Dtype dtype, const Threads& threads) {
  const auto loop =
      g.bits == 8 ? choose_for<DequantizeRange, 8, true>(dtype) : choose_for<DequantizeRange, 4, true>(dtype);
  const int64_t one = size_of(dtype);
  for_each_group(threads, g.groups, g.size, [&](int64_t group) {
    loop(at(g.levels, group, g.size * g.bits / 8), at(g.scale, group, one), at(g.minimum, group, one),
         at(g.x, group, g.size * one), g.size);
  });
}

template <>
void compute(const FakeQuantizeGroups& g, Dtype dtype, const Threads& threads) {
  const auto loop =
      g.symmetric ? choose_for<FakeQuantize, 8, true>(dtype) : choose_for<FakeQuantize, 8, false>(dtype);
  for_each_group(threads, g.groups, g.size, [&](int64_t group) {
    loop(at(g.x, group, g.size * size_of(dtype)), g.noise ? g.noise + group * g.size : nullptr, g.size, g.bits);
  });
}

}  // namespace ds_kernels::cpu
