// Products of small matrices by tensor cores (mma.m16n8k16): 16 x 16 elements of 16 bits with 16 x 8, in float32.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "element.cuh"
#include "reduce.cuh"

namespace ds_kernels::cuda {

// ---- on the device -----------------------------------------------------------------------------------------------

// Whether the code being compiled may use it: a kernel has an empty body where not, and is not launched, see has_mma.
#if defined(DS_KERNELS_CUDA_ON_HOST) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800)
constexpr bool kCompilesMma = true;
#else
constexpr bool kCompilesMma = false;
#endif

// c += a b, by the 32 threads of a warp. With g = lane / 4 and q = lane % 4, a thread has pairs of elements, the
// first one lowest, and sums:
//
//   a[0]  row g      columns 2 q, 2 q + 1          b[0]  rows 2 q, 2 q + 1          column g
//   a[1]  row g + 8  the same                      b[1]  rows 2 q + 8, 2 q + 9      the same
//   a[2]  row g      columns 2 q + 8, 2 q + 9      c[0], c[1]  row g      columns 2 q, 2 q + 1
//   a[3]  row g + 8  the same                      c[2], c[3]  row g + 8  the same
#if defined(DS_KERNELS_CUDA_ON_HOST)

template <class Element>
__device__ inline void mma(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&c)[4], Element) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, q = lane % 4;
  const auto from = [](uint32_t low, uint32_t high, int other, float (&to)[4]) {
    const uint64_t pairs = __shfl_sync(kWholeWarp, low | static_cast<uint64_t>(high) << 32, other);
    widen_two<Element>(static_cast<uint32_t>(pairs), to[0], to[1]);
    widen_two<Element>(static_cast<uint32_t>(pairs >> 32), to[2], to[3]);
  };
  for (int other = 0; other < 4; ++other) {  // the thread of a row, or of a column, that has these k
    float rows[2][4], columns[2][4];
    for (int i = 0; i < 2; ++i) {
      from(a[i], a[i + 2], 4 * g + other, rows[i]);
      from(b[0], b[1], 4 * (2 * q + i) + other, columns[i]);
    }
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 4; ++k) c[i] += rows[i / 2][k] * columns[i % 2][k];
    }
  }
}

#elif !defined(__HIPCC__)

template <class Element>
__device__ __forceinline__ void mma(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&c)[4], Element) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<Element, BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<Element, Float16>, "elements of 16 bits");
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  (void)a, (void)b, (void)c;
#endif
}

#endif

// ---- on the host -------------------------------------------------------------------------------------------------

#if !defined(DS_KERNELS_CUDA_ON_HOST) && !defined(__HIPCC__)
namespace {
__global__ void mma_probe() {}
}  // namespace
#endif

// Whether kernels of this file have `mma` on the current device. What counts is the code that was loaded for it: the
// driver may have made it from PTX for an older one.
inline bool has_mma() {
#if defined(DS_KERNELS_CUDA_ON_HOST)
  return kWarpThreads == 32;
#elif defined(__HIPCC__)
  return false;
#else
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // 0: not asked yet, 1: no, 2: yes
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  int answer = known[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(mma_probe)) != cudaSuccess) {
      cudaGetLastError();  // the launch that follows reports it
      return false;
    }
    answer = attributes.ptxVersion >= 80 ? 2 : 1;
    known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
#endif
}

}  // namespace ds_kernels::cuda
