// Collectives among the ranks of a machine, through memory that they share: what they agree on, without torch.
//
// A tensor goes through the memory in pieces. Each rank has two slots, which it posts its pieces into in turn, and counts
// its pieces. Who has seen that all others have posted piece n takes what it wants out of all slots, and may then post
// n + 1 into its other slot: nobody posts n + 2, into the slot of n, before all have posted n + 1, and so are through with
// n.
//
// Of a large piece that is to be added up, many ranks would each read all slots. There each adds up a share of it, into
// its own slot, where nobody else reads that share; and takes the others' shares out of theirs when they are there.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

namespace ds_kernels::cpu {

// Two cache lines of each rank, because processors fetch two at a time.
struct alignas(128) RankState {
  std::atomic<int64_t> posted;  // pieces; the rank alone writes it, after the slot and `bytes`
  std::atomic<int64_t> shared;  // the last piece of which this rank's share of the sum is in its slot; it alone writes it
  int64_t summed;               // pieces that it is through with; nobody else reads it
  int64_t bytes[2];             // what was left of the tensor when the slot was posted
  int64_t kind[2];              // what it consists of, and what is done with it
};
static_assert(std::atomic<int64_t>::is_always_lock_free, "processes share it");

class SharedRanks {
 public:
  // From how many ranks, and bytes of a piece in all slots together, shares are faster: docs/decisions/0028.
  static constexpr int64_t kManyRanks = 4, kManyBytes = 1 << 17;

  // Of `size` bytes at `base`, zero before the first use, aligned to 128.
  SharedRanks(void* base, int64_t size, int64_t rank, int64_t ranks)
      : states_(static_cast<RankState*>(base)),
        slots_(static_cast<char*>(base) + ranks * int64_t{sizeof(RankState)}),
        slot_bytes_(std::max<int64_t>(0, size - ranks * int64_t{sizeof(RankState)}) / (2 * ranks) / 128 * 128),
        rank_(rank),
        ranks_(ranks) {}

  // Whether a slot has room for so many pieces.
  bool has_room(int64_t pieces = 1) const { return slot_bytes_ / pieces >= 128; }

  // Each takes `start`, and returns where it stopped: at `bytes`, or before it where some rank has kept this one waiting
  // for `patience` seconds; it is then called again with what it returned. All ranks call it with as many bytes of the
  // same kind, a number, or it fails: `other()` is then not -1. `add(output, slots, bytes)` adds up a piece.

  // Adds up `data[start..bytes)` over all ranks.
  template <class Add>
  int64_t all_reduce(char* data, int64_t bytes, int64_t kind, int64_t start, double patience, const Add& add) {
    return pass(
        bytes, slot_bytes_, kind, start, patience,
        [&](char* slot, int64_t at, int64_t piece) { std::memcpy(slot, data + at, piece); },
        [&](int64_t number, int64_t at, int64_t piece) { return sum(number, data + at, piece, patience, add); });
  }

  // Puts the ranks' `input`, each of `bytes`, one after the other into `output`, in which this rank's may already lie.
  int64_t all_gather(char* output, const char* input, int64_t bytes, int64_t kind, int64_t start, double patience) {
    return pass(
        bytes, slot_bytes_, kind, start, patience,
        [&](char* slot, int64_t at, int64_t piece) { std::memcpy(slot, input + at, piece); },
        [&](int64_t number, int64_t at, int64_t piece) {
          for (int64_t rank = 0; rank < ranks_; ++rank) {
            char* const target = output + rank * bytes + at;
            const char* const source = rank == rank_ ? input + at : slot(rank, number);
            if (target != source) std::memcpy(target, source, piece);
          }
          return true;
        });
  }

  // Adds up part `rank` of the ranks' `input`, which has a part of `bytes` for each of them, into `output`; that may be
  // this rank's part.
  template <class Add>
  int64_t reduce_scatter(char* output, const char* input, int64_t bytes, int64_t kind, int64_t start, double patience,
                         const Add& add) {
    return pass(
        bytes, slot_bytes_ / ranks_ / 128 * 128, kind, start, patience,
        [&](char* slot, int64_t at, int64_t piece) {
          for (int64_t rank = 0; rank < ranks_; ++rank) {
            std::memcpy(slot + rank * piece, input + rank * bytes + at, piece);
          }
        },
        [&](int64_t number, int64_t at, int64_t piece) {
          const int64_t part = rank_ * piece;
          add_up(number, slot(rank_, number), output + at, part, part + piece, add);
          return true;
        });
  }

  // Finds `other()` of the last piece once more. It is the same: nobody goes on to the piece after next without this rank.
  void look_again() { other_ = find_other(mine().summed); }

  // A rank that passes on another number of bytes than this one, or another kind, or -1; and what was left of its tensor
  // then.
  int64_t other() const { return other_; }
  int64_t bytes_of(int64_t rank) const { return states_[rank].bytes[mine().summed % 2]; }
  int64_t kind_of(int64_t rank) const { return states_[rank].kind[mine().summed % 2]; }

 private:
  RankState& mine() const { return states_[rank_]; }
  char* slot(int64_t rank, int64_t number) const { return slots_ + (2 * rank + number % 2) * slot_bytes_; }

  // In pieces of at most `most` bytes: `fill(slot, start, piece)` this rank's slot, and `take(number, start, piece)` from
  // all, which gives whether it could.
  template <class Fill, class Take>
  int64_t pass(int64_t bytes, int64_t most, int64_t kind, int64_t start, double patience, const Fill& fill,
               const Take& take) {
    while (start < bytes && other_ < 0) {
      const int64_t piece = std::min(bytes - start, most);
      const int64_t number = mine().summed + 1;
      if (mine().posted.load(std::memory_order_relaxed) < number) {
        fill(slot(rank_, number), start, piece);
        mine().bytes[number % 2] = bytes - start;
        mine().kind[number % 2] = kind;
        mine().posted.store(number, std::memory_order_release);
      }
      if (!wait_for_all(&RankState::posted, number, patience)) break;
      other_ = find_other(number);
      if (other_ < 0 && !take(number, start, piece)) break;
      mine().summed = number;
      start += piece;
    }
    return start;
  }

  // Whether the sum of a piece that all have posted is in `data`.
  template <class Add>
  bool sum(int64_t number, char* data, int64_t piece, double patience, const Add& add) const {
    if (ranks_ >= kManyRanks && ranks_ * piece >= kManyBytes) return sum_shares(number, data, piece, patience, add);
    add_up(number, data, data, 0, piece, add);
    return true;
  }

  template <class Add>
  bool sum_shares(int64_t number, char* data, int64_t piece, double patience, const Add& add) const {
    const auto begin_of = [&](int64_t rank) { return std::min(piece, rank * (piece / ranks_ / 128 + 1) * 128); };
    if (mine().shared.load(std::memory_order_relaxed) < number) {
      const int64_t begin = begin_of(rank_);
      add_up(number, data, slot(rank_, number) + begin, begin, begin_of(rank_ + 1), add);
      mine().shared.store(number, std::memory_order_release);
    }
    if (!wait_for_all(&RankState::shared, number, patience)) return false;
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      const int64_t begin = begin_of(rank);
      std::memcpy(data + begin, slot(rank, number) + begin, begin_of(rank + 1) - begin);
    }
    return true;
  }

  // The sum of [begin, end) of a piece, into `output`. `data` is what this rank has posted, still at hand.
  template <class Add>
  void add_up(int64_t number, const char* data, char* output, int64_t begin, int64_t end, const Add& add) const {
    std::vector<const void*> slots(ranks_);
    for (int64_t rank = 0; rank < ranks_; ++rank) slots[rank] = (rank == rank_ ? data : slot(rank, number)) + begin;
    add(output, slots.data(), end - begin);
  }

  bool wait_for_all(std::atomic<int64_t> RankState::*count, int64_t number, double patience) const {
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      if (!wait_for(states_[rank].*count, number, patience)) return false;
    }
    return true;
  }

  int64_t find_other(int64_t number) const {
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      const RankState& state = states_[rank];
      if (state.bytes[number % 2] != mine().bytes[number % 2]) return rank;
      if (state.kind[number % 2] != mine().kind[number % 2]) return rank;
    }
    return -1;
  }

  // Ranks that take their steps together wait for microseconds: these are spent looking. Where there are fewer cores
  // than ranks, the other one needs this core; and who is late by more is waited for asleep.
  static bool wait_for(const std::atomic<int64_t>& count, int64_t number, double patience) {
    if (seen(count, number)) return true;
    const double begun = seconds();
    while (!seen(count, number)) {
      const double waited = seconds() - begun;
      if (waited > patience) return false;
      if (waited < 1e-3) {
        sched_yield();
      } else {
        const timespec nap{0, 50000};
        nanosleep(&nap, nullptr);
      }
    }
    return true;
  }

  static bool seen(const std::atomic<int64_t>& count, int64_t number) {
    constexpr int kLooks = 64;
    for (int look = 0; look < kLooks; ++look) {
      if (count.load(std::memory_order_acquire) >= number) return true;
      pause();
    }
    return false;
  }

  static double seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  RankState* states_;
  char* slots_;
  int64_t slot_bytes_, rank_, ranks_;
  int64_t other_ = -1;
};

}  // namespace ds_kernels::cpu
