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

// Lanes of a vector in another order; a lane may come twice.
template <size_t... lanes>
DS_KERNELS_INLINE Floats picked(Floats x) {
#ifdef __clang__
  return __builtin_shufflevector(x, x, lanes...);
#else
  return __builtin_shuffle(x, Words{lanes...});
#endif
}

struct Interleaved {
  template <class Element>
  static void turn(const Element* x, Element* y, const float* cos, const float* sin, int64_t head_dim,
                   int64_t rotary_dim) {
    for_each_vector(rotary_dim, [=](int64_t i, auto memory) {
      const PartVector pairs{lanes_in(memory) / 2};
      const Floats c = pairs.load(cos + i / 2), s = pairs.load(sin + i / 2);
      memory.store(y + i, turned(memory.load(x + i), c, s, std::make_index_sequence<kLanes>{}));
    });
    copy_rest(x, y, rotary_dim, head_dim);
  }

  // Pairs of a vector's lanes: each lane meets its neighbour's value, with a sign. The first half of `c` and `s` counts.
  template <size_t... lanes>
  static DS_KERNELS_INLINE Floats turned(Floats value, Floats c, Floats s, std::index_sequence<lanes...>) {
    const Floats signs{(lanes % 2 == 0 ? -1.f : 1.f)...};
    return value * picked<lanes / 2 ...>(c) + picked<lanes ^ 1 ...>(value) * (picked<lanes / 2 ...>(s) * signs);
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
