// What the binding asks of the kernels of linear layers before it decides for them. No torch, no CUDA.
#pragma once

#include <ds_kernels/linear.h>

namespace ds_kernels::cuda {

// Whether the current device does a layer with quantized weights on tensor cores, reading each weight once for up to so
// many inputs. What addresses and strides are yet null do not matter.
constexpr int64_t kMostInputsOfTiles = 32;
bool fits_tiles(const LinearLayer& t, Dtype dtype);

}  // namespace ds_kernels::cuda
