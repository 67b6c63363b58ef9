// What every kernel header needs: names of the instruction-set levels, storage types, inlining.
//
// A CPU loop file is compiled once per instruction-set level. Everything it gets from these headers lies in an
// inline namespace named after the level: otherwise the linker would merge functions of one name, and a baseline
// machine could be handed the AVX-512 copy.
#pragma once

#include <cstdint>

#ifndef DS_KERNELS_CPU_LEVEL
#define DS_KERNELS_CPU_LEVEL baseline
#endif

#if defined(__CUDACC__) || defined(__HIPCC__)
#define DS_KERNELS_GPU_COMPILER
#define DS_KERNELS_INLINE __host__ __device__ __forceinline__
#else
#define DS_KERNELS_INLINE inline __attribute__((always_inline))
#endif

namespace ds_kernels {

enum class Dtype : int { Float32, BFloat16, Float16 };

// For work that does not depend on a dtype.
constexpr Dtype kAnyDtype = Dtype::Float32;

// Storage only: arithmetic is done in float.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

}  // namespace ds_kernels
