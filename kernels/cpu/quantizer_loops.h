// What the loops of quantizer.cpp offer to quantizer_binding.cpp.
#pragma once

#include <ds_kernels/quantizer.h>

namespace ds_kernels::cpu {

// All of these work on one group of `count` elements. `params` has 1 / scale, and the offset unless symmetric.
using QuantizeLoop = void (*)(const void* x, void* levels, float* params, int64_t count);
using DequantizeLoop = void (*)(const void* levels, const float* params, void* x, int64_t count);
using DequantizeRangeLoop = void (*)(const void* levels, const void* scale, const void* minimum, void* x,
                                     int64_t count);
// `noise` is null for rounding to nearest.
using FakeQuantizeLoop = void (*)(void* x, const float* noise, int64_t count, int bits);

// What several devices sent: each `count` levels in groups of `group`, and `params` of those.
struct Received {
  const char* levels;
  const float* params;
  int64_t devices, count, group;
};
// Quantizes elements [begin, end) of the sum as one group.
using ReduceLoop = void (*)(const Received& received, int64_t begin, int64_t end, void* levels, float* params);

struct QuantizerLoops {
  QuantizeLoop (*quantize)(Dtype, int bits, bool symmetric);
  DequantizeLoop (*dequantize)(Dtype, int bits, bool symmetric);
  ReduceLoop (*reduce)(int bits, bool symmetric);
  DequantizeRangeLoop (*dequantize_range)(Dtype, int bits);
  FakeQuantizeLoop (*fake_quantize)(Dtype, bool symmetric);
};

}  // namespace ds_kernels::cpu
