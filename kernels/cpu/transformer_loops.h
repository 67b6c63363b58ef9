// What the loops of transformer.cpp offer to transformer_binding.cpp. Loops work on rows [first, last).
#pragma once

#include <ds_kernels/transformer.h>

namespace ds_kernels::cpu {

template <class Rows>
using RowLoop = void (*)(const Rows& rows, int64_t first, int64_t last);
// `scratch` has room for one row of floats.
template <class Rows>
using ScratchLoop = void (*)(const Rows& rows, int64_t first, int64_t last, float* scratch);
// Adds to `sums`, which has one row of floats for each sum of columns that is wanted; null for none.
template <class Rows>
using SumLoop = void (*)(const Rows& rows, int64_t first, int64_t last, float* sums);

struct TransformerLoops {
  RowLoop<SumRows> (*dropout_add)(Dtype);
  SumLoop<DropoutGradRows> (*dropout_add_backward)(Dtype);
  RowLoop<TrainingNormRows> (*norm)(Dtype);
  SumLoop<NormGradRows> (*norm_backward)(Dtype);  // sums: of weight, of bias, of the input if wanted
  RowLoop<GeluRows> (*gelu)(Dtype);
  SumLoop<GeluGradRows> (*gelu_backward)(Dtype);
  ScratchLoop<MaskedSoftmaxRows> (*softmax)(Dtype);
  ScratchLoop<SoftmaxGradRows> (*softmax_backward)(Dtype);
  // Stores the sum of `count` rows of `columns` floats, which are `distance` apart.
  void (*(*store_sum)(Dtype))(const float* rows, int64_t count, int64_t distance, int64_t columns, void* to);
};

}  // namespace ds_kernels::cpu
