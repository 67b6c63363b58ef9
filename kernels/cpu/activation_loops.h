// What the loops of activation.cpp offer to activation_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

#include <cstdint>

namespace ds_kernels {
enum class Activation : int;
struct ActivationRows;
}

namespace ds_kernels::cpu {

// Works on rows [first, last).
using ActivationLoop = void (*)(const ActivationRows& rows, int64_t first, int64_t last);

struct ActivationLoops {
  ActivationLoop (*bias_activation)(Dtype, Activation);   // activation(input + bias)
  ActivationLoop (*gated_activation)(Dtype, Activation);  // of the halves: first * activation(second)
};

}  // namespace ds_kernels::cpu
