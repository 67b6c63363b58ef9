// Rotary position embedding, head by head. Compiled once per instruction-set level, without torch.
#include <ds_kernels/rotary.h>
#include <ds_kernels/vec.h>

#include <utility>

#include "loops.h"

namespace ds_kernels::cpu {
namespace {

// Elements beyond those that are turned are copied.
template <class Element>
void copy_rest(const Element* input, Element* output, int64_t from, int64_t to) {
  if (input == output) return;
  for (int64_t i = from; i < to; ++i) output[i] = input[i];
}

// Turns one head; `cos` and `sin` have rotary_dim / 2 floats each.
struct Halves {
  template <class Element>
  static void turn(const Element* x, Element* y, const float* cos, const float* sin, int64_t head_dim,
                   int64_t rotary_dim) {
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

// Lane 0 of what is in lane 1, and the other way round, and so on. By a loop over lanes, GCC 16 warns of the result.
template <size_t... lanes>
DS_KERNELS_INLINE Floats neighbours(Floats x, std::index_sequence<lanes...>) {
#ifdef __clang__
  return __builtin_shufflevector(x, x, (lanes ^ 1)...);
#else
  return __builtin_shuffle(x, Words{(lanes ^ 1)...});
#endif
}

struct Interleaved {
  template <class Element>
  static void turn(const Element* x, Element* y, const float* cos, const float* sin, int64_t head_dim,
                   int64_t rotary_dim) {
    // Pairs of a vector's lanes: each lane meets its neighbour's value, with a sign.
    for_each_vector(rotary_dim, [=](int64_t i, auto memory) {
      const Floats value = memory.load(x + i);
      Floats c, s;
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t pair = (i + lane) / 2;
        const bool inside = i + lane < rotary_dim;
        const float sine = inside ? sin[pair] : 0.f;
        c[lane] = inside ? cos[pair] : 0.f;
        s[lane] = lane % 2 == 0 ? -sine : sine;
      }
      memory.store(y + i, value * c + neighbours(value, std::make_index_sequence<kLanes>{}) * s);
    });
    copy_rest(x, y, rotary_dim, head_dim);
  }
};

// Tokens [first, last) of batch * tokens. Heads of a token share its angles, so they come one after the other.
template <class Element, class Pairs>
void turn_tokens(const Rotation& rotation, int64_t first, int64_t last) {
  const Rotation r = rotation;  // a copy, which the compiler knows the stores do not change
  for (int64_t row = first; row < last; ++row) {
    const int64_t batch = row / r.tokens, token = row % r.tokens, angles = r.rotary_dim / 2;
    const float* cos = r.cos + batch * r.cos_batch + token * angles;
    const float* sin = r.sin + batch * r.sin_batch + token * angles;
    const auto at = [&](const Heads& heads, int64_t head) {
      return static_cast<Element*>(heads.data) + batch * heads.batch + head * heads.head + token * heads.token;
    };
    for (int64_t head = 0; head < r.heads; ++head) {
      Pairs::turn(static_cast<const Element*>(at(r.input, head)), at(r.output, head), cos, sin, r.head_dim,
                  r.rotary_dim);
    }
  }
}

template <class Element>
struct RotaryHalves {
  static void run(const Rotation& r, int64_t first, int64_t last) { turn_tokens<Element, Halves>(r, first, last); }
};
template <class Element>
struct RotaryInterleaved {
  static void run(const Rotation& r, int64_t first, int64_t last) { turn_tokens<Element, Interleaved>(r, first, last); }
};

}  // namespace

template <>
void compute(const Rotation& r, Dtype dtype, const Threads& threads) {
  const auto loop = r.interleaved ? by_dtype<RotaryInterleaved>(dtype) : by_dtype<RotaryHalves>(dtype);
  share(threads, r.batch * r.tokens, grain_of(int64_t{r.heads} * r.head_dim),
        [&](int64_t first, int64_t last) { loop(r, first, last); });
}

}  // namespace ds_kernels::cpu
