// What quantizer.cu offers to quantizer_binding.cpp. `params` has 1 / scale of each group, and its offset unless
// symmetric. Levels of 4 bits lie two in a byte.
#pragma once

#include <ds_kernels/config.h>

#include "stream.h"

namespace ds_kernels::cuda {

struct Levels {
  int bits;  // 8 or 4
  bool symmetric;
};

// Where group g goes: from node, device, slice to slice, device, node, in runs of groups that stay together.
struct Swizzle {
  int64_t pipeline = 1, nodes = 1, devices_per_node = 1, run = 0;  // 0: each group stays at its place
};

struct QuantizeGroups {
  const void* x;
  void* levels;
  float* params;
  int64_t groups, size;
  Levels as;
  Swizzle swizzle;
};
void launch_quantize(const char* op, const QuantizeGroups& groups, Dtype dtype, Stream stream);

struct DequantizeGroups {
  const void* levels;
  const float* params;
  void* x;
  int64_t groups, size;
  Levels as;
};
void launch_dequantize(const char* op, const DequantizeGroups& groups, Dtype dtype, Stream stream);

// What several devices sent, each `groups * size` levels in groups of `received_size`, is added up and quantized again.
struct ReduceGroups {
  const void* received;
  const float* received_params;
  int64_t devices, received_size;
  void* levels;
  float* params;
  int64_t groups, size;
  Levels as;
};
void launch_quantized_reduce(const char* op, const ReduceGroups& groups, Stream stream);

// x = level / scale + minimum, with unsigned levels; scale and minimum are of x's dtype, one a group.
struct DequantizeRangeGroups {
  const void* levels;
  const void* scale;
  const void* minimum;
  void* x;
  int64_t groups, size;
  int bits;
};
void launch_dequantize_range(const char* op, const DequantizeRangeGroups& groups, Dtype dtype, Stream stream);

struct FakeQuantizeGroups {
  void* x;
  const float* noise;  // null for rounding to nearest
  int64_t groups, size;
  int bits;  // 2 to 16
  bool symmetric;
};
void launch_fake_quantize(const char* op, const FakeQuantizeGroups& groups, Dtype dtype, Stream stream);

}  // namespace ds_kernels::cuda
