// AMX in C++, so that CPUs without it test what is around its instructions. cpu/amx.h has it with DS_KERNELS_EMULATED_AMX.
#pragma once

#include <ds_kernels/vec_math.h>

namespace ds_kernels {
namespace cpu {

inline bool has_amx() { return true; }

}  // namespace cpu

inline namespace DS_KERNELS_CPU_LEVEL {

#if defined(__AVX512F__)
struct Amx {
  union Register {
    uint16_t halves[kAmxElements];
    float floats[kAmxElements / 2];
  };
  static inline thread_local Register registers[8];
  static inline thread_local bool begun = false;

  static void begin() {
    begun = true;
    for (Register& each : registers) each = {};
  }
  static void end() { begun = false; }
  template <int to>
  static void clear() {
    check();
    registers[to] = {};
  }
  template <int to>
  static void load(const void* from) {
    check();
    __builtin_memcpy(&registers[to], from, sizeof(Register));
  }
  template <int from>
  static void store(float* to) {
    check();
    __builtin_memcpy(to, &registers[from], sizeof(Register));
  }
  template <int sums, int weights, int inputs>
  static void add() {
    check();
    const auto value = [](int of, int64_t at) { return float_of(uint32_t{registers[of].halves[at]} << 16); };
    for (int64_t i = 0; i < kAmxElements / 2; ++i) {
      const int64_t row = i / kAmxRows, input = i % kAmxRows;
      for (int64_t c = 0; c < kAmxColumns; ++c) {
        registers[sums].floats[i] +=
            value(weights, row * kAmxColumns + c) * value(inputs, (c / 2 * kAmxRows + input) * 2 + c % 2);
      }
    }
  }
  // An instruction before begin() or after end() is an illegal one.
  static void check() {
    if (!begun) __builtin_trap();
  }
  static __m256i narrow(Floats x) {
    const Halves halves = narrow_bfloat16(x);
    __m256i narrow;
    __builtin_memcpy(&narrow, &halves, sizeof narrow);
    return narrow;
  }
};
#endif

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels
