// Rotary position embedding. A block has the heads of one token, which share its angles; a thread has packs of pairs.
#include <ds_kernels/rotary.h>

#include "launch.cuh"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

template <class Element>
__device__ __forceinline__ Element* head_of(const Heads& heads, int64_t batch, int head, int64_t token) {
  return static_cast<Element*>(heads.data) + batch * heads.batch + head * heads.head + token * heads.token;
}

// The first and second elements of the pairs [i, i + pack) of a head. Two neighbours are read at once only where a pack
// is: alone they need not be aligned.
template <int pack, bool interleaved, class Element>
__device__ __forceinline__ void load_pairs(const Element* x, int i, int half, float (&first)[pack],
                                           float (&second)[pack]) {
  if constexpr (interleaved && pack > 1) {
    float both[2 * pack];
    load<2 * pack>(x + 2 * i, both);
#pragma unroll
    for (int j = 0; j < pack; ++j) first[j] = both[2 * j], second[j] = both[2 * j + 1];
  } else {
    load<pack>(x + (interleaved ? 2 * i : i), first);
    load<pack>(x + (interleaved ? 2 * i + 1 : half + i), second);
  }
}

template <int pack, bool interleaved, class Element>
__device__ __forceinline__ void store_pairs(Element* y, int i, int half, const float (&first)[pack],
                                            const float (&second)[pack]) {
  if constexpr (interleaved && pack > 1) {
    float both[2 * pack];
#pragma unroll
    for (int j = 0; j < pack; ++j) both[2 * j] = first[j], both[2 * j + 1] = second[j];
    store<2 * pack>(y + 2 * i, both);
  } else {
    store<pack>(y + (interleaved ? 2 * i : i), first);
    store<pack>(y + (interleaved ? 2 * i + 1 : half + i), second);
  }
}

// Turns the pairs [i, i + pack) of a head.
template <class Element, int pack, bool interleaved>
__device__ __forceinline__ void turn(const Element* x, Element* y, const float* cos, const float* sin, int i, int half) {
  float c[pack], s[pack], first[pack], second[pack];
  load<pack>(cos + i, c);
  load<pack>(sin + i, s);
  load_pairs<pack, interleaved>(x, i, half, first, second);
#pragma unroll
  for (int j = 0; j < pack; ++j) {
    const float turned = first[j] * c[j] - second[j] * s[j];
    second[j] = second[j] * c[j] + first[j] * s[j];
    first[j] = turned;
  }
  store_pairs<pack, interleaved>(y, i, half, first, second);
}

template <class Element, int pack, bool interleaved>
__global__ void rotary_kernel(const Rotation r) {
  const int64_t batch = blockIdx.x / r.tokens, token = blockIdx.x - batch * r.tokens;
  const int half = r.rotary_dim / 2, packs = half / pack, rest = r.head_dim - r.rotary_dim;
  const float* cos = r.cos + batch * r.cos_batch + token * half;
  const float* sin = r.sin + batch * r.sin_batch + token * half;
  for (int i = static_cast<int>(threadIdx.x); i < r.heads * packs; i += static_cast<int>(blockDim.x)) {
    const int head = i / packs;
    turn<Element, pack, interleaved>(head_of<const Element>(r.input, batch, head, token),
                                     head_of<Element>(r.output, batch, head, token), cos, sin, (i - head * packs) * pack,
                                     half);
  }
  if (rest == 0 || r.input.data == r.output.data) return;
  // Elements beyond those that are turned are copied.
  for (int i = static_cast<int>(threadIdx.x); i < r.heads * rest; i += static_cast<int>(blockDim.x)) {
    const int head = i / rest, position = r.rotary_dim + i - head * rest;
    head_of<Element>(r.output, batch, head, token)[position] =
        head_of<const Element>(r.input, batch, head, token)[position];
  }
}

bool in_packs(const Rotation& r, int pack) {
  const auto fits = [&](const Heads& heads) {
    return is_aligned(heads.data) && heads.batch % pack == 0 && heads.head % pack == 0 && heads.token % pack == 0;
  };
  return r.rotary_dim / 2 % pack == 0 && fits(r.input) && fits(r.output) && is_aligned(r.cos) && is_aligned(r.sin);
}

template <class Element, bool interleaved>
void launch_rotary(const Rotation& r, const Stream& stream) {
  const auto run = [&](auto pack) {
    const unsigned threads = Share(static_cast<int64_t>(r.heads) * std::max(r.rotary_dim / 2 / pack, 1)).threads;
    launch(stream, rotary_kernel<Element, pack, interleaved>, grid(stream, r.batch * r.tokens), threads, r);
  };
  if (in_packs(r, kPack<Element>)) {
    run(Constant<kPack<Element>>{});
  } else {
    run(Constant<1>{});
  }
}

}  // namespace

template <>
void compute(const Rotation& rotation, Dtype dtype, const Stream& stream) {
  if (rotation.heads == 0 || rotation.head_dim == 0) return;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    return rotation.interleaved ? launch_rotary<Element, true>(rotation, stream)
                                : launch_rotary<Element, false>(rotation, stream);
  });
}

}  // namespace ds_kernels::cuda
