// The host as a device of <ds_kernels/ops/...>: work goes to the loops of the best instruction-set level, on torch's
// threads.
#pragma once

#include <cstring>
#include <memory>

#include <ds_kernels/multi_tensor.h>
#include <ds_kernels/slices.h>
#include <ds_kernels/vec.h>

#include "levels.h"
#include "threads.h"

namespace ds_kernels::cpu {

// Below this many units of slices a thread costs more to wake than it saves.
constexpr int64_t kGrain = 16;

// GCC makes a loop over bytes of `new char[bytes]()`, which took a quarter of a norm's backward pass.
inline std::unique_ptr<char[]> zeros(int64_t bytes) {
  std::unique_ptr<char[]> memory(new char[bytes]);
  std::memset(memory.get(), 0, bytes);
  return memory;
}

class TorchThreads final : public Threads {
 public:
  void run(int64_t items, int64_t grain, int64_t scratch_bytes, Body body, const void* context) const override {
    parallel_for(0, items, grain, [&](int64_t first, int64_t last) {
      if (scratch_bytes == 0) return body(context, first, last, nullptr);
      body(context, first, last, zeros(scratch_bytes).get());
    });
  }

  void run_slices(const int64_t* numels, size_t tensors, SliceBody body, const void* context) const override {
    const Slices slices(numels, tensors);
    parallel_for(0, slices.units(), kGrain, [&](int64_t first, int64_t last) {
      slices.visit(first, last, [&](size_t tensor, int64_t begin, int64_t end) { body(context, tensor, begin, end); });
    });
  }

 private:
  void* memory(int64_t bytes) const override {
    memory_.push_back(zeros(bytes));
    return memory_.back().get();
  }

  mutable std::vector<std::unique_ptr<char[]>> memory_;
};

// What levels.h found; fails, naming the op, if the binary has nothing for this CPU.
template <class Found>
const Found& expect_found(const char* op, const Found& found) {
  DS_KERNELS_CHECK(found, op, "this binary has no code for this CPU; expected a build on a machine of its kind");
  return found;
}

struct Device {
  explicit Device(int32_t) {}  // there is one, and it is always current

  template <class Work>
  void run(const char* op, const Work& work, Dtype dtype) const {
    static const Compute<Work> compute = best_compute<Work>();
    expect_found(op, compute)(work, dtype, TorchThreads());
  }
};

// Whether loops by AVX-512 multiply floats faster than torch's product, which is MKL's: that uses AVX-512 on Intel's CPUs alone, and
// does half of what AMD's can from Zen 5 on. ds_plugin_sdk/ops/_products.py has the same rule. `all` are the levels of those loops.
template <class All>
bool multiply_floats_faster(const All& all) {
  return is_zen5_or_later() && has(all, Level::avx512);
}

// The table of loops for this machine.
template <class Loops>
const Loops& loops_for(const char* op) {
  static const LoopsOf<Loops> loops = best_loops<Loops>();
  return expect_found(op, loops)();
}

}  // namespace ds_kernels::cpu
