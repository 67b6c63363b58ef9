// Dot products of weights with inputs, and what follows them in a linear layer. No torch, no operating system.
//
//   y = activation(W x + b) + residual            gated:  y = h1 activation(h2) + residual,  [h1; h2] = W x + b
//
// Weights are floats of any storage type, or int8 with a scale for each group of columns; sums are floats.
#pragma once

#include <ds_kernels/activation.h>

namespace ds_kernels {

inline namespace DS_KERNELS_CPU_LEVEL {

#ifndef DS_KERNELS_GPU_COMPILER

// Before a loop over the rows or inputs of a tile, so that its sums stay in registers.
#ifdef __clang__
#define DS_KERNELS_UNROLL _Pragma("unroll")
#else
#define DS_KERNELS_UNROLL _Pragma("GCC unroll 8")
#endif

// A whole vector, without fetching ahead.
struct PlainVector {
  template <class Element>
  DS_KERNELS_INLINE Floats load(const Element* from) const {
    return DS_KERNELS_CPU_LEVEL::load(from);
  }
};

// Fetches what lies `ahead` elements on, which may be beyond the array: an address, not a pointer.
template <class Element>
DS_KERNELS_INLINE void prefetch(const Element* from, int64_t ahead) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + ahead * sizeof(Element)));
}

// Rows of weights with inputs that share their columns.
struct Dots {
  int64_t columns;
  int64_t stride;  // from one row of weights to the next, in elements
  int64_t groups;  // of columns that share a scale; one if there are no scales
};

// Adds the products of one vector of each row of weights with one of each input.
template <int rows, int inputs, class Memory, class Weight>
DS_KERNELS_INLINE void add_products(Floats (&sums)[rows][inputs], Memory memory, const Dots& dots, const Weight* weight,
                                    const float* input) {
  Floats values[inputs];
  DS_KERNELS_UNROLL
  for (int m = 0; m < inputs; ++m) values[m] = memory.load(input + m * dots.columns);
  DS_KERNELS_UNROLL
  for (int r = 0; r < rows; ++r) {
    const Floats wide = memory.load(weight + r * dots.stride);
    DS_KERNELS_UNROLL
    for (int m = 0; m < inputs; ++m) sums[r][m] += wide * values[m];
  }
}

// Adds the products of `width` columns.
template <int rows, int inputs, class Weight>
DS_KERNELS_INLINE void add_columns(Floats (&sums)[rows][inputs], const Dots& dots, int64_t width, const Weight* weight,
                                   const float* input) {
  constexpr int64_t line = 64 / sizeof(Weight) > kLanes ? 64 / sizeof(Weight) : kLanes;
  int64_t i = 0;
  for (; i + line <= width; i += line) {
    // The same columns of the next rows: hardware prefetchers stop at every page of every row.
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) prefetch(weight + i, (r + rows) * dots.stride);
    for (int64_t k = i; k < i + line; k += kLanes) {
      add_products(sums, PlainVector{}, dots, weight + k, input + k);
    }
  }
  for (; i + kLanes <= width; i += kLanes) add_products(sums, PlainVector{}, dots, weight + i, input + i);
  if (i < width) add_products(sums, PartVector{width - i}, dots, weight + i, input + i);
}

// `sums[input * sums_stride + row]` for `rows` rows of weights and `inputs` inputs: the sums of one tile stay in
// registers, and each weight is widened once for all inputs.
template <int rows, int inputs, class Weight>
DS_KERNELS_INLINE void dot_tile(const Dots& dots, const Weight* weight, const float* scales, const float* input,
                                float* sums, int64_t sums_stride) {
  const int64_t width = dots.columns / dots.groups;
  Floats total[rows][inputs] = {};
  for (int64_t group = 0; group < dots.groups; ++group) {
    Floats part[rows][inputs] = {};
    add_columns(part, dots, width, weight + group * width, input + group * width);
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) {
      const float scale = scales ? scales[r * dots.groups + group] : 1.f;
      DS_KERNELS_UNROLL
      for (int m = 0; m < inputs; ++m) total[r][m] += scale * part[r][m];
    }
  }
  DS_KERNELS_UNROLL
  for (int m = 0; m < inputs; ++m) {
    DS_KERNELS_UNROLL
    for (int r = 0; r < rows; ++r) sums[m * sums_stride + r] = sum_of(total[r][m]);
  }
}

#endif  // not DS_KERNELS_GPU_COMPILER

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
