// The loops of quantization to small floating-point numbers. Compiled once per instruction-set level, without torch.
#include <ds_kernels/fp_quantizer.h>

#include "loops.h"

namespace ds_kernels::cpu {
namespace {

// Numbers between their vectors and their bytes.
constexpr int64_t kBlock = 64;
struct NumberBlock {
  uint32_t numbers[kBlock + kLanes];
};

// The largest magnitude. They are compared as whole numbers, in which order a NaN lies beyond the infinities: it cannot
// get lost.
template <class Element>
DS_KERNELS_INLINE float largest_magnitude(const Element* x, int64_t count) {
  Integers most{};
  for_each_vector(count, [&most, x](int64_t i, auto memory) {
    const Integers magnitude = (Integers)memory.load(x + i) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  });
  int32_t largest = most[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = most[lane] > largest ? most[lane] : largest;
  return float_of(static_cast<uint32_t>(largest));
}

template <class Element>
struct FpQuantize {
  static void run(const void* from, const float* noise, uint8_t* stored, int64_t count, const FpFormat& given) {
    const FpFormat format = given;  // a copy, which the compiler knows the stores do not change
    const auto* x = static_cast<const Element*>(from);
    const float largest = largest_magnitude(x, count), factor = fp_factor(largest, format);
    const Words half = Words{} + fp_half(format);
    const auto range = static_cast<float>(1 << format.lost());
    NumberBlock block;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t size = count - begin < kBlock ? count - begin : kBlock;
      for_each_vector(size, [&, begin](int64_t i, auto memory) {
        const Words added =
            noise ? __builtin_convertvector(__builtin_convertvector(memory.load(noise + begin + i) * range, Integers),
                                            Words)
                  : half;
        store_bits(block.numbers + i, fp_number(memory.load(x + begin + i) * factor, added, format));
      });
      for (int64_t i = 0; i < size; i += kNumbers) {
        const auto& numbers = *reinterpret_cast<const uint32_t(*)[kNumbers]>(block.numbers + i);
        fp_pack(numbers, format.bits(), stored + (begin + i) * format.bits() / 8);
      }
    }
    fp_store_scale(largest / fp_largest(format), stored + count * format.bits() / 8);
  }
};

template <class Element>
struct FpDequantize {
  static void run(const uint8_t* stored, void* to, int64_t count, const FpFormat& given) {
    const FpFormat format = given;
    auto* x = static_cast<Element*>(to);
    const float scale = fp_load_scale(stored + count * format.bits() / 8);
    NumberBlock block;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t size = count - begin < kBlock ? count - begin : kBlock;
      for (int64_t i = 0; i < size; i += kNumbers) {
        auto& numbers = *reinterpret_cast<uint32_t(*)[kNumbers]>(block.numbers + i);
        fp_unpack(stored + (begin + i) * format.bits() / 8, format.bits(), numbers);
      }
      for_each_vector(size, [&, begin](int64_t i, auto memory) {
        memory.store(x + begin + i, fp_value(load_bits<Words>(block.numbers + i), format) * scale);
      });
    }
  }
};

// Calls `body(group)` for every group, of `size` elements.
template <class Body>
void for_each_fp_group(const Threads& threads, int64_t groups, int64_t size, const Body& body) {
  share(threads, groups, grain_of(size), [&](int64_t first, int64_t last) {
    for (int64_t group = first; group < last; ++group) body(group);
  });
}

int64_t size_of(Dtype dtype) { return dtype == Dtype::Float32 ? 4 : 2; }

}  // namespace

template <>
void compute(const FpQuantizeGroups& g, Dtype dtype, const Threads& threads) {
  const auto loop = by_dtype<FpQuantize>(dtype);
  for_each_fp_group(threads, g.groups, g.size, [&](int64_t group) {
    loop(static_cast<const char*>(g.x) + group * g.size * size_of(dtype), g.noise ? g.noise + group * g.size : nullptr,
         static_cast<uint8_t*>(g.stored) + group * fp_row_bytes(g.size, g.format), g.size, g.format);
  });
}

template <>
void compute(const FpDequantizeGroups& g, Dtype dtype, const Threads& threads) {
  const auto loop = by_dtype<FpDequantize>(dtype);
  for_each_fp_group(threads, g.groups, g.size, [&](int64_t group) {
    loop(static_cast<const uint8_t*>(g.stored) + group * fp_row_bytes(g.size, g.format),
         static_cast<char*>(g.x) + group * g.size * size_of(dtype), g.size, g.format);
  });
}

}  // namespace ds_kernels::cpu
