// Work done without torch, at every instruction-set level that was built and that this machine runs.
#pragma once

#include <ds_kernels/slices.h>

#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <typeinfo>
#include <vector>

#include "check.h"
#include "levels.h"

namespace ds_kernels::cpu {

// So many shares of everything, one after the other or on threads of their own; what is shared out need not be large.
class Shares final : public Threads {
 public:
  explicit Shares(int64_t count = 2, bool at_once = false) : count_(count), at_once_(at_once) {}

  void run(int64_t items, int64_t, int64_t scratch_bytes, Body body, const void* context) const override {
    for_each_share(items, [=](int64_t first, int64_t last) {
      std::vector<char> scratch(scratch_bytes);
      body(context, first, last, scratch.data());
    });
  }

  void run_slices(const int64_t* numels, size_t tensors, SliceBody body, const void* context) const override {
    const Slices slices(numels, tensors);
    for_each_share(slices.units(), [&](int64_t first, int64_t last) {
      slices.visit(first, last, [&](size_t tensor, int64_t begin, int64_t end) { body(context, tensor, begin, end); });
    });
  }

 private:
  void* memory(int64_t bytes) const override {
    memory_.emplace_back(new char[bytes]());
    return memory_.back().get();
  }

  template <class Body>
  void for_each_share(int64_t items, const Body& body) const {
    std::vector<std::thread> threads;
    for (int64_t share = 0; share < count_; ++share) {
      const int64_t first = items * share / count_, last = items * (share + 1) / count_;
      if (first == last) continue;
      if (!at_once_) {
        body(first, last);
        continue;
      }
      threads.emplace_back([&body, first, last] { body(first, last); });
    }
    for (auto& thread : threads) thread.join();
  }

  int64_t count_;
  bool at_once_;
  mutable std::vector<std::unique_ptr<char[]>> memory_;
};

// Counts a run of a kind of work: "NormRows at avx2".
template <class Work>
void count_run(Level level) {
#define DS_KERNELS_NAME(level) #level,
  static const char* const names[] = {DS_KERNELS_CPU_LEVELS(DS_KERNELS_NAME)};
#undef DS_KERNELS_NAME
  const std::unique_ptr<char, decltype(&std::free)> whole(
      abi::__cxa_demangle(typeid(Work).name(), nullptr, nullptr, nullptr), std::free);
  const std::string name(whole.get());
  ++runs[name.substr(name.rfind(':') + 1) + " at " + names[static_cast<size_t>(level)]];
}

// Does any work at one level.
struct AtLevel {
  Level level;

  template <class Work>
  void operator()(const Work& work, Dtype dtype, const Threads& threads = Shares()) const {
    for (const auto& [each, compute] : all_compute<Work>()) {
      if (each != level) continue;
      CHECK(compute, "level %d lacks a kind of work", int(level));
      if (!compute) continue;
      compute(work, dtype, threads);
      count_run<Work>(level);
    }
  }
};

// Calls `test(compute)` for each level where this kind of work was built.
template <class Work, class Test>
void at_all_levels(Test test) {
  int tested = 0;
  for (const auto& [level, compute] : all_compute<Work>()) {
    if (!compute || !runs_here(level)) continue;
    ++tested;
    test(AtLevel{level});
  }
  CHECK(tested > 0, "no level was built that runs here");
}

// Calls `test(loops, level)` with each level's table.
template <class Loops, class Test>
void at_all_levels_of(Test test) {
  int tested = 0;
  for (const auto& [level, loops] : all_loops<Loops>()) {
    if (!loops || !runs_here(level)) continue;
    ++tested;
    count_run<Loops>(level);
    test(loops(), static_cast<int>(level));
  }
  CHECK(tested > 0, "no level was built that runs here");
}

}  // namespace ds_kernels::cpu
