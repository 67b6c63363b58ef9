// Rows whose elements may be dropped: which columns a thread has, and which of them it keeps.
//
// One counter of the random numbers serves four columns, 16 apart (philox.h). So a thread has four packs of neighbouring
// columns, 16 apart: it makes every number once. Four columns a pack: more would not fit into registers.
#pragma once

#include <ds_kernels/philox.h>

#include "row.cuh"

namespace ds_kernels::cuda {

constexpr int kPacks = 4;        // of a thread
constexpr int kQuadPack = 4;     // elements of a pack, or one where addresses allow no more
constexpr int kApart = 16;       // columns from one to the next
constexpr int kCovered = kPacks * kApart;

// ---- columns -----------------------------------------------------------------------------------------------------

// How many threads it takes to have all columns once.
template <int pack>
__host__ __device__ __forceinline__ int64_t quads_of(int64_t columns) {
  return (columns + kCovered - 1) / kCovered * (kApart / pack);
}

// Four packs of a row.
template <int pack>
struct Quad {
  int64_t first, columns;

  __device__ __forceinline__ Quad(int64_t index, int64_t columns)
      : first(index / (kApart / pack) * kCovered + index % (kApart / pack) * pack), columns(columns) {}

  __device__ __forceinline__ int64_t column(int k) const { return first + k * kApart; }

  // Calls `body(k, column)` for the packs that are in the row.
  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (column(k) < columns) body(k, column(k));
    }
  }

  // The same element by element: `body(value of each, ...)`.
  template <class Body, class... Values>
  __device__ __forceinline__ void for_each_value(const Body& body, Values&... values) const {
    for_each([&](int k, int64_t) {
#pragma unroll
      for (int j = 0; j < pack; ++j) body(values[k][j]...);
    });
  }

  template <class Element>
  __device__ __forceinline__ void load_from(const Element* row, float (&x)[kPacks][pack]) const {
    for_each([&](int k, int64_t column) { load<pack>(row + column, x[k]); });
  }
  // x += elements of a row, which may be null.
  template <class Element>
  __device__ __forceinline__ void add_from(const Element* row, float (&x)[kPacks][pack]) const {
    if (!row) return;
    float more[kPacks][pack] = {};
    load_from(row, more);
    for_each_value([](float& to, float from) { to += from; }, x, more);
  }
  template <class Element>
  __device__ __forceinline__ void store_to(Element* row, const float (&x)[kPacks][pack]) const {
    for_each([&](int k, int64_t column) { store<pack>(row + column, x[k]); });
  }
};

// ---- dropout -----------------------------------------------------------------------------------------------------

// Which elements of a quad are kept, and what they are multiplied by.
template <int pack>
class Kept {
 public:
  // The seed is read here, on the device: a graph that is replayed takes the one that is there then.
  __device__ __forceinline__ Kept(const SeededDropout& dropout, int64_t row, const Quad<pack>& quad) {
    if (!dropout.seed) return;
    const auto seed = static_cast<uint64_t>(*dropout.seed);
    const auto counter = static_cast<uint32_t>(quad.first / kCovered * kApart + quad.first % kApart);
    bits_ = 0;
#pragma unroll
    for (int j = 0; j < pack; ++j) {
      uint32_t words[4] = {counter + j, static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32), 0};
      philox(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
#pragma unroll
      for (int k = 0; k < kPacks; ++k) bits_ |= static_cast<uint32_t>(words[k] >= dropout.threshold) << (k * pack + j);
    }
    factor_ = dropout.factor;
  }

  __device__ __forceinline__ void apply(float (&x)[kPacks][pack]) const {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int j = 0; j < pack; ++j) x[k][j] = bits_ >> (k * pack + j) & 1 ? x[k][j] * factor_ : 0.f;
    }
  }

 private:
  static_assert(kPacks * pack <= 32, "a bit for each element");
  uint32_t bits_ = 0xffffffffu;
  float factor_ = 1;
};

}  // namespace ds_kernels::cuda
