// What the loops of norm.cpp offer to norm_binding.cpp.
#pragma once

#include <ds_kernels/config.h>
#include <ds_kernels/norm.h>

namespace ds_kernels::cpu {

// Normalises rows [first, last); `scratch` has room for one row of floats.
using NormLoop = void (*)(const NormRows& rows, int64_t first, int64_t last, float* scratch);

struct NormLoops {
  NormLoop (*layer_norm)(Dtype);
  NormLoop (*rms_norm)(Dtype);
};

}  // namespace ds_kernels::cpu
