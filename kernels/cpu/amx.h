// Whether a process may have products of bfloat16 by AMX.
#pragma once

#include <ds_kernels/vec.h>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ds_kernels::cpu {

#if defined(DS_KERNELS_EMULATED_AMX)
inline bool has_amx() { return true; }
#elif defined(__x86_64__) && defined(__linux__)
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

}  // namespace ds_kernels::cpu
