// Two elements of 16 bits in a word, and levels made such elements: exactly, by way of a mantissa.
#pragma once

#include <cstdint>
#include <type_traits>

#include "element.cuh"

namespace ds_kernels::cuda {

// The same number in both elements of a pair.
template <class Element>
__host__ __device__ constexpr uint32_t twice(uint32_t brain, uint32_t half) {
  return (std::is_same_v<Element, BFloat16> ? brain : half) * 0x10001u;
}

// The sums of two pairs of elements, where they are exact.
template <class Element>
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t sums;
  if constexpr (std::is_same_v<Element, BFloat16>) {  // an addition of its own comes with sm_90
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(twice<Element>(0x3f80, 0)), "r"(b));
  } else {
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
  }
  return sums;
#else
  float x[2], y[2];
  widen_two<Element>(a, x[0], x[1]), widen_two<Element>(b, y[0], y[1]);
  return narrow_two<Element>(x[0] + y[0], x[1] + y[1]);
#endif
}

// (bits & mask) | more in one instruction: of two that are no variables the compiler makes two.
__device__ __forceinline__ uint32_t masked_with(uint32_t bits, uint32_t mask, uint32_t more) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "r"(mask), "r"(more));
  return result;
#else
  return (bits & mask) | more;
#endif
}

// Two int8 levels, in bytes 0 and 2 of `bytes`; the others do not matter. By way of the mantissa of 1024, which has room for
// eight bits, or of 128, which has it for seven: the sign is then taken off as 128, in the step from 128 to 256.
template <class Element>
__device__ __forceinline__ uint32_t pair_of_levels(uint32_t bytes) {
  if constexpr (std::is_same_v<Element, Float16>) {
    const uint32_t above = masked_with(bytes ^ 0x00800080u, 0x00ff00ffu, 0x64006400u);
    return add_pairs<Element>(above, twice<Element>(0, 0xe480));  // - (1024 + 128)
  } else {
    const uint32_t above = masked_with(bytes, 0x007f007fu, 0x43004300u);
    return add_pairs<Element>(above, masked_with(bytes, 0x00800080u, 0xc300c300u));
  }
}

}  // namespace ds_kernels::cuda
