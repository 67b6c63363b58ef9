// Chooses among the instruction-set levels that a binary was built with.
//
// Each level's object defines its table of loops in a namespace of the level's name. The references here are weak: a
// level that was not linked in is a null pointer, so the binding is compiled in one way only and needs no list.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <ds_kernels/binding.h>

namespace ds_kernels::cpu {

enum class Level { avx512, avx2, neon, power9, baseline };

// Whether this machine, and its operating system, run code of `level`.
inline bool runs_here(Level level) {
  switch (level) {
#if defined(__x86_64__)
    case Level::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && runs_here(Level::avx2);
    case Level::avx2: {
      unsigned a, b, c, d;  // GCC before 11 cannot be asked for F16C by name
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
             (c & bit_F16C);
    }
#elif defined(__aarch64__)
    case Level::neon: return true;
#elif defined(__powerpc64__)
    case Level::power9: return __builtin_cpu_supports("arch_3_00");
#endif
    case Level::baseline: return true;
    default: return false;
  }
}

}  // namespace ds_kernels::cpu

#define DS_KERNELS_CPU_DECLARE(level, Table, table) \
  namespace level {                                 \
  extern const Table table __attribute__((weak));   \
  }

#define DS_KERNELS_CPU_CONSIDER(level, table) \
  if (&level::table && runs_here(Level::level)) return &level::table;

// In namespace ds_kernels::cpu: defines `const Table& best_##table(op)`, the fastest table that was linked in and runs
// on this machine; fails, naming the op, if there is none.
#define DS_KERNELS_CPU_LEVELS(Table, table)                                                                    \
  DS_KERNELS_CPU_DECLARE(avx512, Table, table)                                                                 \
  DS_KERNELS_CPU_DECLARE(avx2, Table, table)                                                                   \
  DS_KERNELS_CPU_DECLARE(neon, Table, table)                                                                   \
  DS_KERNELS_CPU_DECLARE(power9, Table, table)                                                                 \
  DS_KERNELS_CPU_DECLARE(baseline, Table, table)                                                               \
  inline const Table& best_##table(const char* op) {                                                           \
    static const Table* const best = []() -> const Table* {                                                    \
      DS_KERNELS_CPU_CONSIDER(avx512, table)                                                                   \
      DS_KERNELS_CPU_CONSIDER(avx2, table)                                                                     \
      DS_KERNELS_CPU_CONSIDER(neon, table)                                                                     \
      DS_KERNELS_CPU_CONSIDER(power9, table)                                                                   \
      DS_KERNELS_CPU_CONSIDER(baseline, table)                                                                 \
      return nullptr;                                                                                          \
    }();                                                                                                       \
    DS_KERNELS_CHECK(best, op, "this binary has no code for this CPU; build the op on a machine of this kind"); \
    return *best;                                                                                              \
  }
