// What the loops of transformer.cpp offer to transformer_binding.cpp.
//
// All arrays are rows of `columns` elements of one dtype, unless said otherwise. Loops work on rows [first, last).
#pragma once

#include <ds_kernels/philox.h>

namespace ds_kernels::cpu {

// sum = residual + dropout(input + bias)
struct SumRows {
  const void* input;
  const void* bias;      // one row, or null
  const void* residual;  // or null
  void* sum;
  int64_t columns;
  bool dropping;
  Dropout dropout;
};

// The norm of that sum, or of the input itself if `sum` is null.
struct NormRows {
  SumRows sum;
  const void* weight;  // one row
  const void* bias;    // one row
  void* output;
  float* mean;  // one a row
  float* rstd;  // one a row: 1 / sqrt(variance + eps)
  float eps;
};

struct NormGradRows {
  const void* grad_output;
  const void* grad_sum;  // or null
  const void* rows;      // the sum; or the norm's output if `mean` is null
  const float* mean;     // or null
  const float* rstd;
  const void* weight;  // one row
  const void* bias;    // one row; wanted if `mean` is null
  void* grad_total;    // the gradient of the sum
  void* grad_input;    // that after dropout; null if nothing is dropped
  bool bias_sums;      // whether the columns of the gradient of the input are summed
  int64_t columns;
  bool dropping;
  Dropout dropout;
};

struct DropoutGradRows {
  const void* grad_output;
  void* grad_input;
  int64_t columns;
  bool dropping;
  Dropout dropout;
};

struct GeluRows {
  const void* input;
  const void* bias;  // one row, or null
  void* output;
  int64_t columns;
  bool tanh;
};

struct GeluGradRows {
  const void* grad_output;
  const void* input;
  const void* bias;  // one row, or null
  void* grad_input;
  int64_t columns;
  bool tanh;
};

// How the dimensions before the last are laid out: row r of the scores adds the mask's row at the offset of r.
constexpr int kLeadingDimensions = 4;
struct SoftmaxRows {
  const void* scores;
  const void* mask;  // or null
  int64_t sizes[kLeadingDimensions];
  int64_t mask_strides[kLeadingDimensions];
  bool mask_is_one;  // each of the mask's rows is one element, for all columns
  void* output;      // after dropout
  void* probs;       // before dropout; null if nothing is dropped
  int64_t columns;
  float scale;
  bool dropping;
  Dropout dropout;
};

struct SoftmaxGradRows {
  const void* grad_output;
  const void* probs;
  void* grad_scores;
  int64_t columns;
  float scale;
  bool dropping;
  Dropout dropout;
};

template <class Rows>
using RowLoop = void (*)(const Rows& rows, int64_t first, int64_t last);
// `scratch` has room for one row of floats.
template <class Rows>
using ScratchLoop = void (*)(const Rows& rows, int64_t first, int64_t last, float* scratch);
// Adds to `sums`, which has one row of floats for each array whose columns are summed.
template <class Rows>
using SumLoop = void (*)(const Rows& rows, int64_t first, int64_t last, float* sums);

struct TransformerLoops {
  RowLoop<SumRows> (*dropout_add)(Dtype);
  SumLoop<DropoutGradRows> (*dropout_add_backward)(Dtype);  // sums: grad_input
  RowLoop<NormRows> (*norm)(Dtype);
  SumLoop<NormGradRows> (*norm_backward)(Dtype);  // sums: of weight, of bias, of the gradient of the input if wanted
  RowLoop<GeluRows> (*gelu)(Dtype);
  SumLoop<GeluGradRows> (*gelu_backward)(Dtype);  // sums: grad_input
  ScratchLoop<SoftmaxRows> (*softmax)(Dtype);
  ScratchLoop<SoftmaxGradRows> (*softmax_backward)(Dtype);
  // Stores the sum of `count` rows of `columns` floats, which are `distance` apart.
  void (*(*store_sum)(Dtype))(const float* rows, int64_t count, int64_t distance, int64_t columns, void* to);
};

}  // namespace ds_kernels::cpu
