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

// Rows of weights with inputs that share their columns.
struct Dots {
  int64_t columns;
  int64_t stride;  // from one row of weights to the next, in elements
  int64_t groups;  // of columns that share a scale; one if there are no scales
};

// `sums[input * sums_stride + row]` for `rows` rows of weights and `inputs` inputs: all products of one tile stay in
// registers, and each weight is widened once for all inputs.
template <int rows, int inputs, class Weight>
DS_KERNELS_INLINE void dot_tile(const Dots& dots, const Weight* weight, const float* scales, const float* input,
                                float* sums, int64_t sums_stride) {
  const int64_t columns = dots.columns, stride = dots.stride, width = columns / dots.groups;
  Floats total[rows][inputs] = {};
  for (int64_t group = 0; group < dots.groups; ++group) {
    Floats part[rows][inputs] = {};
    const Weight* w = weight + group * width;
    const float* x = input + group * width;
    for_each_vector(width, [&](int64_t i, auto memory) {
      Floats values[inputs];
      for (int m = 0; m < inputs; ++m) values[m] = memory.load(x + m * columns + i);
      for (int r = 0; r < rows; ++r) {
        // The rows of the next tile: hardware prefetchers stop at the end of each row's page.
        __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(w + r * stride + i) +
                                                         rows * stride * sizeof(Weight)));
        const Floats wide = memory.load(w + r * stride + i);
        for (int m = 0; m < inputs; ++m) part[r][m] += wide * values[m];
      }
    });
    for (int r = 0; r < rows; ++r) {
      const float scale = scales ? scales[r * dots.groups + group] : 1.f;
      for (int m = 0; m < inputs; ++m) total[r][m] += scale * part[r][m];
    }
  }
  for (int m = 0; m < inputs; ++m) {
    for (int r = 0; r < rows; ++r) sums[m * sums_stride + r] = sum_of(total[r][m]);
  }
}

#endif  // not DS_KERNELS_GPU_COMPILER

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
