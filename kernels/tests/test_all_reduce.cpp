// Sums over ranks through shared memory, with threads for ranks: every level, every dtype, whatever the pieces are.
#include <cstring>
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
// Each wait for one that has no core lasts until the system takes a core from another: few pieces only.
constexpr int64_t kMoreThanCores = 8;
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

// `work(rank)` of all ranks at once.
template <class Work>
void at_once(int64_t ranks, const Work& work) {
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < ranks; ++rank) threads.emplace_back(work, rank);
  for (std::thread& thread : threads) thread.join();
}

// All three in turn, through the same memory: more and fewer elements than a slot holds, in place and not.
void test_all_three(Dtype dtype, int64_t ranks, int64_t slot, const std::vector<int64_t>& counts) {
  Memory memory(ranks, slot);
  const int64_t element = dtype == Dtype::Float32 ? 4 : 2;
  const auto add = [&](void* output, const void* const* slots, int64_t bytes) {
    loops->sum(dtype)({output, slots, ranks, bytes / element});
  };
  at_once(ranks, [&](int64_t rank) {
    bool in_place = false;
    for (const int64_t count : counts) {
      in_place = !in_place;
      const int64_t bytes = count * element;
      Elements all(dtype, ranks * count), part = numbers(dtype, rank, count), sum(dtype, count);
      char* const data = static_cast<char*>(all.data());
      char* const own = in_place ? data + rank * bytes : static_cast<char*>(part.data());
      std::memcpy(own, part.data(), bytes);
      int64_t end = memory.of(rank).all_gather(data, own, bytes, 1, 0, kPatience);
      int wrong = end != bytes;
      for (int64_t i = 0; i < ranks * count; ++i) wrong += all[i] != numbers(dtype, i / count, count)[i % count];
      CHECK(!wrong, "%d of %d elements of %d ranks", wrong, static_cast<int>(count), static_cast<int>(ranks));

      // Of part p, rank r has its numbers times p + 1; what is added up is exact in every dtype for these.
      for (int64_t i = 0; i < ranks * count; ++i) all.set(i, number(rank, i % count) + static_cast<float>(i / count));
      char* const output = in_place ? data + rank * bytes : static_cast<char*>(sum.data());
      end = memory.of(rank).reduce_scatter(output, data, bytes, 2, 0, kPatience, add);
      if (in_place) std::memcpy(sum.data(), output, bytes);
      wrong = end != bytes;
      for (int64_t i = 0; i < count; ++i) {
        float expected = 0;
        for (int64_t other = 0; other < ranks; ++other) expected += number(other, i) + static_cast<float>(rank);
        wrong += sum[i] != expected;
      }
      CHECK(!wrong, "%d of %d sums of a part over %d ranks", wrong, static_cast<int>(count), static_cast<int>(ranks));
      reduce(memory.of(rank), ranks, dtype, part, 0, kPatience);
      check_sums(dtype, ranks, part);
    }
  });
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

// The same of the other two.
void test_patience_of_the_others() {
  Memory memory(2, 256);
  const auto add = [](void* output, const void* const* slots, int64_t bytes) {
    loops->sum(Dtype::Float32)({output, slots, 2, bytes / 4});
  };
  std::vector<Elements> parts, all;
  for (int64_t rank = 0; rank < 2; ++rank) {
    parts.push_back(numbers(Dtype::Float32, rank, 100));
    all.emplace_back(Dtype::Float32, 200);
  }
  const auto gather = [&](int64_t rank, int64_t start) {
    return memory.of(rank).all_gather(static_cast<char*>(all[rank].data()), static_cast<char*>(parts[rank].data()), 400, 1,
                                      start, 0.001);
  };
  CHECK(gather(0, 0) == 0, "nobody had come");
  CHECK(gather(1, 0) == 256, "the first piece was there");
  CHECK(gather(0, 0) == 400, "all pieces were there");
  CHECK(gather(1, 256) == 400, "the rest was there");
  for (size_t i = 0; i < 200; ++i) {
    CHECK(all[0][i] == number(i / 100, i % 100) && all[1][i] == all[0][i], "element %zu", i);
  }
  const auto scatter = [&](int64_t rank, int64_t start) {
    return memory.of(rank).reduce_scatter(static_cast<char*>(parts[rank].data()), static_cast<char*>(all[rank].data()), 400,
                                          2, start, 0.001, add);
  };
  CHECK(scatter(0, 0) == 0, "nobody had come");
  CHECK(scatter(1, 0) == 128, "the first piece was there");
  CHECK(scatter(0, 0) == 256, "two pieces were there");
  CHECK(scatter(1, 128) == 384, "and two more");
  CHECK(scatter(0, 256) == 400, "all were there");
  CHECK(scatter(1, 384) == 400, "the rest was there");
  for (size_t i = 0; i < 100; ++i) {
    CHECK(parts[0][i] == 2 * number(0, i) && parts[1][i] == 2 * number(1, i), "sum %zu", i);
  }
}

// Ranks that do different things with as many bytes learn of it.
void test_other_collective() {
  Memory memory(2, 256);
  at_once(2, [&](int64_t rank) {
    SharedRanks mine = memory.of(rank);
    Elements data = numbers(Dtype::Float32, rank, 50), all(Dtype::Float32, 100);
    const auto never = [](void*, const void* const*, int64_t) { CHECK(false, "added up"); };
    if (rank == 0) {
      mine.all_reduce(static_cast<char*>(data.data()), 200, 0, 0, kPatience, never);
    } else {
      mine.all_gather(static_cast<char*>(all.data()), static_cast<char*>(data.data()), 200, 1, 0, kPatience);
    }
    CHECK(mine.other() == 1 - rank && mine.kind_of(0) == 0 && mine.kind_of(1) == 1, "rank %d", static_cast<int>(rank));
  });
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
    CHECK(mine.kind_of(0) != mine.kind_of(1), "their dtypes");
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
      for (const int64_t ranks : {1, 2, 3}) test_sums(dtype, ranks, 256, {0, 1, 17, 64, 128, 129, 1000, 3, 5000, 2});
      test_sums(dtype, kMoreThanCores, 256, {0, 17, 129, 1000, 3});
      for (const int64_t ranks : {3, 4, 7}) test_sums(dtype, ranks, 1 << 17, {99999, 5, 32769, 200000, 16384, 65536});
    }
    for (const Dtype dtype : {Dtype::Float32, Dtype::BFloat16}) {
      for (const int64_t ranks : {1, 2, 3}) test_all_three(dtype, ranks, 1024, {0, 1, 17, 128, 129, 1000, 3, 2, 5000});
      test_all_three(dtype, kMoreThanCores, 1024, {17, 129, 1000, 3});
    }
    test_rounding();
    test_patience();
    test_patience_with_shares();
    test_patience_of_the_others();
    test_other_collective();
    test_other_size();
    test_other_dtype();
  });
  return report();
}
