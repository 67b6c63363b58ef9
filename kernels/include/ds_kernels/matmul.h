// A product of matrices of floats, as it is asked of a device. No torch, no operating system.
#pragma once

#include <ds_kernels/config.h>

namespace ds_kernels {

// Elements (i, j) lie at data[i * stride + j], or, transposed, at data[j * stride + i].
struct Matrix {
  const float* data;
  int64_t stride;
  bool transposed;
};

// c = beta c + a b
struct Matmul {
  int64_t rows, columns, depth;
  Matrix a;    // [rows, depth]
  Matrix b;    // [depth, columns]
  float* c;    // [rows, columns], contiguous
  float beta;  // c is not read where it is 0
};

}  // namespace ds_kernels
