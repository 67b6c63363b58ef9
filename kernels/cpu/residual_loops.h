// What the loops of residual.cpp offer to residual_binding.cpp.
#pragma once

#include <ds_kernels/config.h>
#include <ds_kernels/residual.h>

namespace ds_kernels::cpu {

// Both work on rows [first, last).
struct ResidualLoops {
  void (*(*add_bias)(Dtype))(const ResidualRows& rows, int64_t first, int64_t last);
  void (*(*mix)(Dtype))(const MixRows& rows, int64_t first, int64_t last);
};

}  // namespace ds_kernels::cpu
