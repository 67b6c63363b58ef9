// Sums over ranks through shared memory, with threads for ranks: every level, every dtype, whatever the pieces are.
#include <string>
#include <thread>
#include <vector>

#include "all_reduce_loops.h"
#include "at_levels.h"
#include "elements.h"
#include "shared_ranks.h"

using namespace ds_kernels;
using namespace ds_kernels::cpu;

namespace {

constexpr double kPatience = 60;
const AllReduceLoops* loops;

// Room for `ranks` ranks, with slots of `slot` bytes.
struct Memory {
  Memory(int64_t ranks, int64_t slot) : ranks(ranks), lines((ranks * (128 + 2 * slot)) / 128) {}

  SharedRanks of(int64_t rank) { return {lines.data(), static_cast<int64_t>(lines.size() * 128), rank, ranks}; }

  struct alignas(128) Line {
    char bytes[128] = {};
  };
  int64_t ranks;
  std::vector<Line> lines;
};

int64_t reduce(SharedRanks memory, int64_t ranks, Dtype dtype, Elements& data, int64_t start, double patience) {
  const int64_t element = dtype == Dtype::Float32 ? 4 : 2;
  const auto add = [&](void* output, const void* const* slots, int64_t bytes) {
    loops->sum(dtype)({output, slots, ranks, bytes / element});
  };
  const int64_t bytes = static_cast<int64_t>(data.count()) * element;
  return memory.all_reduce(static_cast<char*>(data.data()), bytes, static_cast<int64_t>(dtype), start, patience, add);
}

// Numbers whose sums every dtype holds.
float number(int64_t rank, size_t i) { return static_cast<float>((rank + 1) * (static_cast<int>(i % 7) - 3)); }

Elements numbers(Dtype dtype, int64_t rank, size_t count) {
  Elements data(dtype, count);
  for (size_t i = 0; i < count; ++i) data.set(i, number(rank, i));
  return data;
}

void check_sums(Dtype dtype, int64_t ranks, const Elements& data) {
  int wrong = 0;
  for (size_t i = 0; i < data.count(); ++i) {
    double sum = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) sum += number(rank, i);
    wrong += data[i] != sum;
  }
  CHECK(!wrong, "%d of %zu sums of dtype %d over %d ranks", wrong, data.count(), static_cast<int>(dtype), static_cast<int>(ranks));
}

// One after the other and without a barrier: sums of more and of fewer elements than a slot holds.
void test_sums(Dtype dtype, int64_t ranks, int64_t slot, const std::vector<size_t>& counts) {
  Memory memory(ranks, slot);
  std::vector<std::thread> threads;
  std::vector<std::vector<Elements>> results(ranks);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      for (const size_t count : counts) {
        results[rank].push_back(numbers(dtype, rank, count));
        reduce(memory.of(rank), ranks, dtype, results[rank].back(), 0, kPatience);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& of_rank : results) {
    for (const Elements& result : of_rank) check_sums(dtype, ranks, result);
  }
}

// A rank that is not there in time: the call says how far it got, and goes on from there.
void test_patience() {
  Memory memory(2, 256);
  const Dtype dtype = Dtype::Float32;
  Elements first = numbers(dtype, 0, 100), second = numbers(dtype, 1, 100);
  CHECK(reduce(memory.of(0), 2, dtype, first, 0, 0.001) == 0, "nobody had come");
  CHECK(reduce(memory.of(1), 2, dtype, second, 0, 0.001) == 256, "the first piece was there");
  CHECK(reduce(memory.of(0), 2, dtype, first, 0, 0.001) == 400, "all pieces were there");
  CHECK(reduce(memory.of(1), 2, dtype, second, 256, 0.001) == 400, "the rest was there");
  check_sums(dtype, 2, first);
  check_sums(dtype, 2, second);
}

// The same while the ranks wait for each other's shares of a large piece.
void test_patience_with_shares() {
  constexpr int64_t kRanks = SharedRanks::kManyRanks, kCount = SharedRanks::kManyBytes / 8;
  Memory memory(kRanks, SharedRanks::kManyBytes);
  std::vector<Elements> data;
  for (int64_t rank = 0; rank < kRanks; ++rank) data.push_back(numbers(Dtype::Float32, rank, kCount));
  const auto check_gives = [&](int64_t rank, int64_t expected) {
    const int64_t given = reduce(memory.of(rank), kRanks, Dtype::Float32, data[rank], 0, 0.001);
    CHECK(given == expected, "rank %d got to %d", static_cast<int>(rank), static_cast<int>(given));
  };
  for (int64_t rank = 0; rank < kRanks; ++rank) check_gives(rank, 0);  // the last has seen all pieces and adds its share
  for (int64_t rank = 0; rank < kRanks - 2; ++rank) check_gives(rank, 0);
  check_gives(kRanks - 2, 4 * kCount);  // the last share
  check_gives(kRanks - 1, 4 * kCount);
  for (int64_t rank = 0; rank < kRanks - 2; ++rank) check_gives(rank, 4 * kCount);
  for (const Elements& each : data) check_sums(Dtype::Float32, kRanks, each);
}

// Tensors of different sizes are not added up, and what comes after them is.
void test_other_size() {
  Memory memory(2, 256);
  const auto work = [&](int64_t rank, size_t count) {
    SharedRanks mine = memory.of(rank);
    Elements data = numbers(Dtype::Float32, rank, count);
    const auto never = [](void*, const void* const*, int64_t) { CHECK(false, "added up"); };
    mine.all_reduce(static_cast<char*>(data.data()), static_cast<int64_t>(4 * count), 0, 0, kPatience, never);
    CHECK(mine.other() == 1 - rank, "rank %d sees %d", static_cast<int>(rank), static_cast<int>(mine.other()));
    CHECK(mine.bytes_of(0) == 400 && mine.bytes_of(1) == 800, "their sizes");
    Elements next = numbers(Dtype::Float32, rank, 70);
    reduce(memory.of(rank), 2, Dtype::Float32, next, 0, kPatience);
    check_sums(Dtype::Float32, 2, next);
  };
  std::thread other(work, 1, 200);
  work(0, 100);
  other.join();
}

// As many bytes of another dtype neither.
void test_other_dtype() {
  Memory memory(2, 256);
  const auto work = [&](int64_t rank, Dtype dtype) {
    SharedRanks mine = memory.of(rank);
    Elements data = numbers(dtype, rank, 100);
    const auto never = [](void*, const void* const*, int64_t) { CHECK(false, "added up"); };
    mine.all_reduce(static_cast<char*>(data.data()), 200, static_cast<int64_t>(dtype), 0, kPatience, never);
    CHECK(mine.other() == 1 - rank, "rank %d sees %d", static_cast<int>(rank), static_cast<int>(mine.other()));
    CHECK(mine.dtype_of(0) != mine.dtype_of(1), "their dtypes");
  };
  std::thread other(work, 1, Dtype::Float16);
  work(0, Dtype::BFloat16);
  other.join();
}

// In the order of the ranks, rounded once.
void test_rounding() {
  Elements small(Dtype::BFloat16, 3), large(Dtype::BFloat16, 3);
  for (size_t i = 0; i < 3; ++i) {
    small.set(i, 0.5f);
    large.set(i, 256);  // neighbours are 2 apart
  }
  const void* slots[] = {large.data(), small.data(), small.data(), small.data()};
  Elements sum(Dtype::BFloat16, 3);
  loops->sum(Dtype::BFloat16)({sum.data(), slots, 4, 3});
  for (size_t i = 0; i < 3; ++i) CHECK(sum[i] == 258, "256 + 3 * 0.5 is %g", sum[i]);
}

}  // namespace

int main() {
  at_all_levels_of<AllReduceLoops>([](const AllReduceLoops& at_level, int) {
    loops = &at_level;
    for (const Dtype dtype : {Dtype::Float32, Dtype::BFloat16, Dtype::Float16}) {
      for (const int64_t ranks : {1, 2, 3, 8}) test_sums(dtype, ranks, 256, {0, 1, 17, 64, 128, 129, 1000, 3, 5000, 2});
      for (const int64_t ranks : {3, 4, 7}) test_sums(dtype, ranks, 1 << 17, {99999, 5, 32769, 200000, 16384, 65536});
    }
    test_rounding();
    test_patience();
    test_patience_with_shares();
    test_other_size();
    test_other_dtype();
  });
  return report();
}
