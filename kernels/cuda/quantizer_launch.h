// What quantizer.cu offers to quantizer_binding.cpp.
#pragma once

#include <ds_kernels/quantizer.h>

#include "stream.h"

namespace ds_kernels::cuda {

void launch_quantize(const char* op, const QuantizeGroups& groups, Dtype dtype, Stream stream);
void launch_dequantize(const char* op, const DequantizeGroups& groups, Dtype dtype, Stream stream);
void launch_quantized_reduce(const char* op, const ReduceGroups& groups, Stream stream);
void launch_dequantize_range(const char* op, const DequantizeRangeGroups& groups, Dtype dtype, Stream stream);
void launch_fake_quantize(const char* op, const FakeQuantizeGroups& groups, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
