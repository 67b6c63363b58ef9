// Rotary position embedding of one head. Compiled once per instruction-set level, without torch.
#include "rotary_loops.h"
#include "by_dtype.h"

#include <ds_kernels/vec.h>

namespace ds_kernels::cpu {
namespace {

// Elements beyond those that are turned are copied.
template <class Element>
void copy_rest(const Element* input, Element* output, int64_t from, int64_t to) {
  if (input == output) return;
  for (int64_t i = from; i < to; ++i) output[i] = input[i];
}

template <class Element>
struct RotaryHalves {
  static void run(const void* input, void* output, const float* cos, const float* sin, int64_t head_dim,
                  int64_t rotary_dim) {
    const auto* x = static_cast<const Element*>(input);
    auto* y = static_cast<Element*>(output);
    const int64_t half = rotary_dim / 2;
    for_each_vector(half, [=](int64_t i, auto memory) {
      const Floats first = memory.load(x + i), second = memory.load(x + half + i);
      const Floats c = memory.load(cos + i), s = memory.load(sin + i);
      memory.store(y + i, first * c - second * s);
      memory.store(y + half + i, second * c + first * s);
    });
    copy_rest(x, y, rotary_dim, head_dim);
  }
};

template <class Element>
struct RotaryInterleaved {
  static void run(const void* input, void* output, const float* cos, const float* sin, int64_t head_dim,
                  int64_t rotary_dim) {
    const auto* x = static_cast<const Element*>(input);
    auto* y = static_cast<Element*>(output);
    // Pairs of a vector's lanes: each lane meets its neighbour's value, with a sign.
    for_each_vector(rotary_dim, [=](int64_t i, auto memory) {
      const Floats value = memory.load(x + i);
      Floats neighbour, c, s;
      for (int lane = 0; lane < kLanes; lane += 2) {
        const int64_t pair = (i + lane) / 2;
        const bool inside = i + lane < rotary_dim;
        neighbour[lane] = value[lane + 1];
        neighbour[lane + 1] = value[lane];
        c[lane] = c[lane + 1] = inside ? cos[pair] : 0.f;
        s[lane + 1] = inside ? sin[pair] : 0.f;
        s[lane] = -s[lane + 1];
      }
      memory.store(y + i, value * c + neighbour * s);
    });
    copy_rest(x, y, rotary_dim, head_dim);
  }
};

}  // namespace

inline namespace DS_KERNELS_CPU_LEVEL {
extern const RotaryLoops rotary_loops{by_dtype<RotaryHalves>, by_dtype<RotaryInterleaved>};
}

}  // namespace ds_kernels::cpu
