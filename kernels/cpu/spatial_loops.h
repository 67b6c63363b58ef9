// What the loops of spatial.cpp offer to spatial_binding.cpp.
#pragma once

#include <ds_kernels/config.h>
#include <ds_kernels/spatial.h>

namespace ds_kernels::cpu {

// Rows [first, last).
using BiasLoop = void (*)(const BiasRows& rows, int64_t first, int64_t last);

struct SpatialLoops {
  BiasLoop (*bias_add)(Dtype);
};

}  // namespace ds_kernels::cpu
