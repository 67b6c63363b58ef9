// Chooses among the instruction-set levels that a binary was built with.
//
// Each level's object defines its table of loops in a namespace of the level's name. The references here are weak: a
// level that was not linked in is a null pointer, so the binding is compiled in one way only and needs no list.
#pragma once

#include <cstddef>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

// A level's table of loops, or null if the level was not linked in.
template <class Table>
struct Built {
  Level level;
  const Table* table;
};

// The table of the best level that was linked in and runs here, or null.
template <class Table, size_t levels>
const Table* best(const Built<Table> (&built)[levels]) {
  for (const auto& [level, table] : built) {
    if (table && runs_here(level)) return table;
  }
  return nullptr;
}

}  // namespace ds_kernels::cpu

#define DS_KERNELS_CPU_DECLARE(level, Table, table) \
  namespace level {                                 \
  extern const Table table __attribute__((weak));   \
  }

// In namespace ds_kernels::cpu: declares every level's `const Table table`, and defines `all_##table()`, an array of
// Built<Table>, the best level first.
#define DS_KERNELS_CPU_LEVELS(Table, table)                          \
  DS_KERNELS_CPU_DECLARE(avx512, Table, table)                       \
  DS_KERNELS_CPU_DECLARE(avx2, Table, table)                         \
  DS_KERNELS_CPU_DECLARE(neon, Table, table)                         \
  DS_KERNELS_CPU_DECLARE(power9, Table, table)                       \
  DS_KERNELS_CPU_DECLARE(baseline, Table, table)                     \
  inline const auto& all_##table() {                                 \
    static const Built<Table> all[] = {{Level::avx512, &avx512::table},     \
                                       {Level::avx2, &avx2::table},         \
                                       {Level::neon, &neon::table},         \
                                       {Level::power9, &power9::table},     \
                                       {Level::baseline, &baseline::table}}; \
    return all;                                                      \
  }
