// The ops of <ds_kernels/ops/random_ltd.h> for tensors in host memory.
#include "random_ltd_loops.h"

#include <ds_kernels/ops/random_ltd.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(RandomLTDLoops, random_ltd_loops)

namespace {

constexpr int64_t kBytesPerShare = 64 * 1024;

// Shares of things of `bytes` bytes each that are worth waking a thread for.
int64_t grain(int64_t bytes) { return std::max<int64_t>(1, kBytesPerShare / std::max<int64_t>(bytes, 1)); }

struct RandomLTD : Host {
  using Host::Host;

  bool within(const char* op, const int32_t* indices, int64_t count, int64_t limit) const {
    return loops_for(op, all_random_ltd_loops()).within(indices, count, limit);
  }

  void sort(const char* op, const TokenRows& r) const {
    const auto sort = loops_for(op, all_random_ltd_loops()).sort;
    parallel_for(0, r.rows, grain(4 * (r.sequence + r.reserved)), [&](int64_t first, int64_t last) {
      std::vector<int32_t> seen(r.sequence);
      for (int64_t row = first; row < last; ++row) {
        int32_t* to = r.to + row * r.reserved;
        std::copy_n(r.from + row * r.reserved, r.reserved, to);
        sort(to, r.reserved, seen.data(), r.sequence);
      }
    });
  }

  void gather(const char* op, const TokenMove& move) const {
    const auto gather = loops_for(op, all_random_ltd_loops()).gather;
    parallel_for(0, move.batch * move.reserved, grain(move.bytes),
                 [&](int64_t first, int64_t last) { gather(move, first, last); });
  }

  // Shares are columns of one sequence: where an index repeats, one thread writes both, and the last one wins.
  void scatter(const char* op, const TokenMove& move) const {
    const auto scatter = loops_for(op, all_random_ltd_loops()).scatter;
    const int64_t columns = std::max<int64_t>(1, move.bytes / 512), width = (move.bytes + columns - 1) / columns;
    parallel_for(0, move.batch * columns, grain(width * move.reserved), [&](int64_t first, int64_t last) {
      for (int64_t sequence = first / columns; first < last; ++sequence) {
        const int64_t stop = std::min(last, (sequence + 1) * columns);
        const int64_t begin = (first - sequence * columns) * width, end = (stop - sequence * columns) * width;
        scatter(move, sequence, std::min(begin, move.bytes), std::min(end, move.bytes));
        first = stop;
      }
    });
  }

  void gather_mask(const char* op, const MaskGather& mask) const {
    const auto gather = loops_for(op, all_random_ltd_loops()).mask(mask.element_size);
    parallel_for(0, mask.layers * mask.batch * mask.reserved, grain(mask.reserved * mask.element_size),
                 [&](int64_t first, int64_t last) { gather(mask, first, last); });
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { RandomLTDOps<RandomLTD>::implement(m); }

}  // namespace ds_kernels::cpu
