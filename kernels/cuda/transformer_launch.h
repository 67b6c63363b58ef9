// What transformer.cu offers to transformer_binding.cpp. All arrays are rows of `columns` elements of one dtype, on the
// device, unless said otherwise.
#pragma once

#include <ds_kernels/config.h>

#include "stream.h"

namespace ds_kernels::cuda {

struct SeededDropout {
  const int64_t* seed;  // on the device; null where nothing is dropped
  uint32_t threshold;
  float factor;
};

// sum = residual + dropout(input + bias)
struct SumRows {
  const void* input;
  const void* bias;      // one row, or null
  const void* residual;  // or null
  void* sum;
  int64_t rows, columns;
  SeededDropout dropout;
};
void launch_dropout_add(const char* op, const SumRows& rows, Dtype dtype, Stream stream);

// The norm of that sum, or of the input itself if `sum` is null.
struct TrainingNormRows {
  SumRows sum;
  const void* weight;  // one row
  const void* bias;    // one row
  void* output;
  float* mean;  // one a row
  float* rstd;  // one a row: 1 / sqrt(variance + eps)
  float eps;
};
void launch_training_norm(const char* op, const TrainingNormRows& rows, Dtype dtype, Stream stream);

// Where the sums of columns go: a row for each array, and room for the sums of parts of the rows. Null without sums.
constexpr int kMostSums = 3;
struct ColumnSums {
  void* totals[kMostSums];
  float* parts;  // column_parts(rows) x arrays x columns
};
int64_t column_parts(int64_t rows);

struct NormGradRows {
  const void* grad_output;
  const void* grad_sum;  // or null
  const void* rows_in;   // the sum; or the norm's output if `mean` is null
  const float* mean;     // or null
  const float* rstd;
  const void* weight;  // one row
  const void* bias;    // one row; wanted if `mean` is null
  void* grad_total;    // the gradient of the sum
  void* grad_input;    // that after dropout; null if nothing is dropped
  float* means;        // room for two floats a row
  int64_t rows, columns;
  SeededDropout dropout;
  ColumnSums sums;  // of weight, bias, and input unless its total is null
};
void launch_training_norm_backward(const char* op, const NormGradRows& rows, Dtype dtype, Stream stream);

struct DropoutGradRows {
  const void* grad_output;
  void* grad_input;
  int64_t rows, columns;
  SeededDropout dropout;
  ColumnSums sums;  // of grad_input
};
void launch_dropout_add_backward(const char* op, const DropoutGradRows& rows, Dtype dtype, Stream stream);

struct GeluRows {
  const void* input;
  const void* bias;  // one row, or null
  void* output;
  int64_t rows, columns;
  bool tanh;
};
void launch_bias_gelu(const char* op, const GeluRows& rows, Dtype dtype, Stream stream);

struct GeluGradRows {
  const void* grad_output;
  const void* input;
  const void* bias;  // one row, or null
  void* grad_input;
  int64_t rows, columns;
  bool tanh;
  ColumnSums sums;  // of grad_input
};
void launch_bias_gelu_backward(const char* op, const GeluGradRows& rows, Dtype dtype, Stream stream);

// How the dimensions before the last are laid out: row r of the scores adds the mask's row at the offset of r.
constexpr int kLeadingDimensions = 4;
struct MaskedSoftmaxRows {
  const void* scores;
  const void* mask;  // or null
  int64_t sizes[kLeadingDimensions];
  int64_t mask_strides[kLeadingDimensions];
  bool mask_is_one;  // each of the mask's rows is one element, for all columns
  void* output;      // after dropout
  void* probs;       // before dropout; null if nothing is dropped
  int64_t rows, columns;
  float scale;
  SeededDropout dropout;
};
void launch_masked_softmax(const char* op, const MaskedSoftmaxRows& rows, Dtype dtype, Stream stream);

struct SoftmaxGradRows {
  const void* grad_output;
  const void* probs;
  void* grad_scores;
  int64_t rows, columns;
  float scale;
  SeededDropout dropout;
};
void launch_masked_softmax_backward(const char* op, const SoftmaxGradRows& rows, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
