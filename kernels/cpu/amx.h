// AMX: whether a process may have its products of bfloat16, and its instructions.
#pragma once

#include <ds_kernels/vec.h>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ds_kernels {
inline namespace DS_KERNELS_CPU_LEVEL {

// Rows of a register, and columns of bfloat16 in one of them.
constexpr int64_t kAmxRows = 16, kAmxColumns = 32;
constexpr int64_t kAmxElements = kAmxRows * kAmxColumns;

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels

#if defined(DS_KERNELS_EMULATED_AMX)
#include "../tests/emulated_amx.h"
#else
namespace ds_kernels {
namespace cpu {

#if defined(__x86_64__) && defined(__linux__)
// Asks Linux for the registers, for the whole process: it gives them on request alone, since 5.16. torch asks, too.
inline bool has_amx() {
  static const bool given = [] {
    constexpr unsigned kBFloat16 = 1u << 22;
    constexpr long kRequest = 0x1023, kRegisters = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!has_avx512_bf16()) return false;  // it rounds what is laid out
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBFloat16) && syscall(SYS_arch_prctl, kRequest, kRegisters) == 0;
  }();
  return given;
}
#else
inline bool has_amx() { return false; }
#endif

}  // namespace cpu

inline namespace DS_KERNELS_CPU_LEVEL {

#if defined(__AVX512F__)
// Its instructions. Not by intrinsics, so that this level's binary also runs where there are none: the binding asks has_amx(). And
// by their bytes: assemblers before binutils 2.35 do not know the names.
struct Amx {
  // Of all registers 16 rows of 64 bytes.
  static DS_KERNELS_INLINE void begin() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    // ldtilecfg (rax)
    __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x00" : : "a"(&shapes), "m"(shapes));
  }
  // tilerelease
  static DS_KERNELS_INLINE void end() { __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0"); }
  // tilezero
  template <int to>
  static DS_KERNELS_INLINE void clear() {
    __asm__ volatile(".byte 0xc4, 0xe2, 0x7b, 0x49, %c0" : : "i"(0xc0 | to << 3));
  }
  // tileloadd (rax, rcx, 1)
  template <int to>
  static DS_KERNELS_INLINE void load(const void* from) {
    __asm__ volatile(".byte 0xc4, 0xe2, 0x7b, 0x4b, %c0, 0x08" : : "i"(0x04 | to << 3), "a"(from), "c"(int64_t{64}) : "memory");
  }
  // tilestored (rax, rcx, 1)
  template <int from>
  static DS_KERNELS_INLINE void store(float* to) {
    __asm__ volatile(".byte 0xc4, 0xe2, 0x7a, 0x4b, %c0, 0x08" : : "i"(0x04 | from << 3), "a"(to), "c"(int64_t{64}) : "memory");
  }
  // tdpbf16ps
  template <int sums, int weights, int inputs>
  static DS_KERNELS_INLINE void add() {
    __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" : : "i"((15 - inputs) << 3 | 2), "i"(0xc0 | sums << 3 | weights));
  }
  static DS_KERNELS_INLINE __m256i narrow(Floats x) {
    __m256i narrow;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(narrow) : "v"(x));
    return narrow;
  }
};
#endif

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
#endif
