// Chooses among the instruction-set levels that a binary was built with.
//
// Each level's object defines its functions in a namespace of the level's name. The references here are weak: a function
// of a level that was not linked in is a null pointer, so the binding is compiled in one way only and needs no list.
#pragma once

#include <array>
#include <cstddef>

#include <ds_kernels/config.h>

#include "threads.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

// All levels of levels.json, of each architecture the best first.
#define DS_KERNELS_CPU_LEVELS(DO) DO(avx512) DO(avx2) DO(neon) DO(power9) DO(baseline)

namespace ds_kernels::cpu {

#define DS_KERNELS_NAME(level) level,
enum class Level { DS_KERNELS_CPU_LEVELS(DS_KERNELS_NAME) };
#undef DS_KERNELS_NAME
#define DS_KERNELS_COUNT(level) +1
constexpr size_t kLevels = DS_KERNELS_CPU_LEVELS(DS_KERNELS_COUNT);
#undef DS_KERNELS_COUNT

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

// What loops.h declares, at every level.
#define DS_KERNELS_DECLARE(level)                                               \
  namespace level {                                                             \
  template <class Work>                                                         \
  __attribute__((weak)) void compute(const Work&, Dtype, const Threads&);       \
  template <class Loops>                                                        \
  __attribute__((weak)) const Loops& loops();                                   \
  }
DS_KERNELS_CPU_LEVELS(DS_KERNELS_DECLARE)
#undef DS_KERNELS_DECLARE

template <class Work>
using Compute = void (*)(const Work&, Dtype, const Threads&);
template <class Loops>
using LoopsOf = const Loops& (*)();

// A level's function, or null if the level was not linked in.
template <class Function>
struct Built {
  Level level;
  Function function;
};

// Compilers think that a template's function is never null: they must not know that it is one.
template <class Function>
Built<Function> built(Level level, Function function) {
  __asm__("" : "+r"(function));
  return {level, function};
}

template <class Work>
auto all_compute() {
#define DS_KERNELS_BUILT(level) built<Compute<Work>>(Level::level, level::compute<Work>),
  return std::array<Built<Compute<Work>>, kLevels>{{DS_KERNELS_CPU_LEVELS(DS_KERNELS_BUILT)}};
#undef DS_KERNELS_BUILT
}

template <class Loops>
auto all_loops() {
#define DS_KERNELS_BUILT(level) built<LoopsOf<Loops>>(Level::level, level::loops<Loops>),
  return std::array<Built<LoopsOf<Loops>>, kLevels>{{DS_KERNELS_CPU_LEVELS(DS_KERNELS_BUILT)}};
#undef DS_KERNELS_BUILT
}

// The function of the best level that was linked in and runs here, or null.
template <class All>
auto best(const All& all) {
  for (const auto& [level, function] : all) {
    if (function && runs_here(level)) return function;
  }
  return decltype(all.front().function){nullptr};
}
// Whether the function of a level was linked in and runs here.
template <class All>
bool has(const All& all, Level level) {
  for (const auto& each : all) {
    if (each.level == level) return each.function && runs_here(level);
  }
  return false;
}
template <class Work>
Compute<Work> best_compute() {
  return best(all_compute<Work>());
}
template <class Loops>
LoopsOf<Loops> best_loops() {
  return best(all_loops<Loops>());
}

}  // namespace ds_kernels::cpu
