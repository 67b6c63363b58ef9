// What the loops of rotary.cpp offer to rotary_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include <cstdint>

namespace ds_kernels::cpu {

// One head of one token: elements that lie one after the other. `cos` and `sin` have rotary_dim / 2 floats each.
using RotaryLoop = void (*)(const void* input, void* output, const float* cos, const float* sin, int64_t head_dim,
                            int64_t rotary_dim);

struct RotaryLoops {
  RotaryLoop (*halves)(Dtype);       // element i is turned with element i + rotary_dim / 2
  RotaryLoop (*interleaved)(Dtype);  // element 2i is turned with element 2i + 1
};

}  // namespace ds_kernels::cpu
