// What transformer.cu offers to transformer_binding.cpp.
#pragma once

#include <ds_kernels/transformer.h>

#include "stream.h"

namespace ds_kernels::cuda {

// Sums of columns are those of parts of the rows first: `parts` is room for column_parts(rows) x sums x columns floats,
// or null if none are wanted.
constexpr int kNormSums = 3;  // wanted or not
int64_t column_parts(int64_t rows);

void launch_dropout_add(const char* op, const SumRows& rows, Dtype dtype, Stream stream);
void launch_dropout_add_backward(const char* op, const DropoutGradRows& rows, float* parts, Dtype dtype, Stream stream);
void launch_training_norm(const char* op, const TrainingNormRows& rows, Dtype dtype, Stream stream);
// `means` is room for two floats a row.
void launch_training_norm_backward(const char* op, const NormGradRows& rows, float* means, float* parts, Dtype dtype,
                                   Stream stream);
void launch_bias_gelu(const char* op, const GeluRows& rows, Dtype dtype, Stream stream);
void launch_bias_gelu_backward(const char* op, const GeluGradRows& rows, float* parts, Dtype dtype, Stream stream);
void launch_masked_softmax(const char* op, const MaskedSoftmaxRows& rows, Dtype dtype, Stream stream);
void launch_masked_softmax_backward(const char* op, const SoftmaxGradRows& rows, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
