#include "async_io.h"

#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "ring.h"

namespace ds_kernels {
namespace {

constexpr int64_t kMostEntries = 4096;  // of a queue; the kernel allows more, and nothing gains from it

int64_t whole(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

struct Operation {
  const int fd, fallback;
  char* const memory;
  const int64_t size, offset;
  const bool write;
  // Under the mutex of its `Io`:
  int64_t begun = 0;      // bytes that a thread has taken
  int64_t remaining;      // bytes that have not come to an end
  int32_t error = 0;
};

// Bytes [begin, end) of an operation.
struct Part {
  Operation* operation = nullptr;
  int64_t begin = 0, end = 0;

  explicit operator bool() const { return begin < end; }
  char* memory() const { return operation->memory + begin; }
  int64_t offset() const { return operation->offset + begin; }
  size_t size() const { return static_cast<size_t>(end - begin); }

  // Takes away up to `size` bytes at the beginning.
  Part take(int64_t size) {
    const Part taken{operation, begin, std::min(end, begin + size)};
    begin = taken.end;
    return taken;
  }
};

// Bytes, or -errno.
int64_t transfer(const Part& part, int fd) {
  const auto offset = static_cast<off_t>(part.offset());
  const int64_t done = part.operation->write ? pwrite(fd, part.memory(), part.size(), offset)
                                             : pread(fd, part.memory(), part.size(), offset);
  return done < 0 ? -errno : done;
}

// What a block came to after `result` through the first descriptor: the rest goes through the other one, which has no
// rules about alignment, and whose answer counts.
int32_t complete(Part block, int64_t result) {
  block.take(std::max<int64_t>(result, 0));
  while (block) {
    const int64_t done = transfer(block, block.operation->fallback);
    if (done == 0) return block.operation->write ? EIO : kIoEndOfFile;
    if (done < 0 && done != -EINTR) return static_cast<int32_t>(-done);
    block.take(std::max<int64_t>(done, 0));
  }
  return 0;
}

// Threads begun within its scope get no signals: those are for the program's own.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

class Io {
 public:
  Io(int64_t block_size, int64_t queue_depth, int64_t threads, int32_t flags)
      : block_size_(whole(std::max<int64_t>(block_size, 1), kIoPage)),
        depth_(std::clamp<int64_t>(queue_depth, 1, kMostEntries)),
        flags_(flags) {
    threads = std::max<int64_t>(threads, 1);
    shares_ = threads;
#ifdef DS_KERNELS_HAVE_RING
    for (int64_t i = 0; i < threads && !(flags & kIoNoRing); ++i) {
      rings_.push_back(std::make_unique<Ring>(static_cast<uint32_t>(depth_)));
      if (!*rings_.back()) {
        rings_.clear();
        break;
      }
    }
#endif
    if (rings() == 0) shares_ = threads *= std::min(depth_, kIoThreadsPerQueue);
    const NoSignals scope;
    try {
      for (int64_t i = 0; i < threads; ++i) threads_.emplace_back(&Io::run, this, i);
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Io() { stop(); }
  Io(const Io&) = delete;
  Io& operator=(const Io&) = delete;

  int64_t rings() const {
#ifdef DS_KERNELS_HAVE_RING
    return static_cast<int64_t>(rings_.size());
#else
    return 0;
#endif
  }

  void submit(Operation* operation) {
    if (operation->size <= 0) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(operation);
    }
    begun_.notify_all();
  }

  int32_t wait(const Operation* operation) {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return operation->remaining <= 0; });
    return operation->error;
  }

 private:
  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    begun_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  // The next part of what is to be done, a thread's share of an operation; none if there is nothing, or, having waited
  // for it, when all is to end.
  Part next(bool wait) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wait) begun_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return {};
    Operation& operation = *queue_.front();
    const int64_t share = whole((operation.size + shares_ - 1) / shares_, block_size_);
    const Part part{&operation, operation.begun, std::min(operation.size, operation.begun + share)};
    operation.begun = part.end;
    if (operation.begun == operation.size) queue_.pop_front();
    return part;
  }

  // A part has come to an end. After this, whoever waits may delete the operation.
  void finish(const Part& part, int32_t error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Operation& operation = *part.operation;
    if (operation.error == 0) operation.error = error;
    operation.remaining -= static_cast<int64_t>(part.size());
    if (operation.remaining <= 0) finished_.notify_all();
  }

  bool failed(const Part& part) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return part.operation->error != 0;
  }

  // A thread.
  void run([[maybe_unused]] int64_t index) {
#ifdef DS_KERNELS_HAVE_RING
    if (!rings_.empty()) return run_ring(*rings_[static_cast<size_t>(index)]);
#endif
    while (Part part = next(true)) {
      while (part && !failed(part)) {
        const Part block = part.take(block_size_);
        finish(block, complete(block, transfer(block, block.operation->fd)));
      }
      if (part) finish(part, 0);
    }
  }

#ifdef DS_KERNELS_HAVE_RING
  struct Slot {
    Part block;
    iovec memory;
  };

  void run_ring(Ring& ring) {
    std::vector<Slot> slots(static_cast<size_t>(depth_));
    std::vector<uint64_t> free;
    for (size_t i = slots.size(); i > 0; --i) free.push_back(i - 1);
    Part part;
    while (true) {
      while (!free.empty()) {
        if (!part) part = next(free.size() == slots.size());
        if (!part) break;
        if (failed(part)) {
          finish(part, 0);
          part = {};
          continue;
        }
        Slot& slot = slots[free.back()];
        slot.block = part.take(block_size_);
        slot.memory = {slot.block.memory(), slot.block.size()};
        const Operation& operation = *slot.block.operation;
        ring.add(free.back(), operation.write, operation.fd, &slot.memory, slot.block.offset());
        free.pop_back();
        if (flags_ & kIoSingleSubmit) ring.submit(0);
      }
      const size_t under_way = slots.size() - free.size();
      if (under_way == 0) return;  // all is to end
      ring.submit(flags_ & kIoOverlap ? 1 : static_cast<uint32_t>(under_way));
      ring.reap([&](uint64_t name, int32_t result) {
        const Part& block = slots[name].block;
        finish(block, complete(block, result));
        free.push_back(name);
      });
    }
  }

  std::vector<std::unique_ptr<Ring>> rings_;
#endif

  const int64_t block_size_, depth_;
  const int32_t flags_;
  int64_t shares_;  // parts of an operation: one for each thread
  std::mutex mutex_;
  std::condition_variable begun_, finished_;
  std::deque<Operation*> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace
}  // namespace ds_kernels

using ds_kernels::Io;
using ds_kernels::Operation;

void* ds_io_start(int64_t block_size, int64_t queue_depth, int64_t threads, int32_t flags) {
  try {
    return new Io(block_size, queue_depth, threads, flags);
  } catch (const std::system_error&) {
    return nullptr;
  }
}

int64_t ds_io_rings(const void* io) { return static_cast<const Io*>(io)->rings(); }

void* ds_io_submit(void* io, int32_t fd, int32_t fallback, void* memory, int64_t size, int64_t offset, int32_t write) {
  auto* operation = new Operation{fd, fallback, static_cast<char*>(memory), size, offset, write != 0, 0, size};
  static_cast<Io*>(io)->submit(operation);
  return operation;
}

int32_t ds_io_wait(void* io, void* operation) {
  const std::unique_ptr<Operation> mine(static_cast<Operation*>(operation));
  return static_cast<Io*>(io)->wait(mine.get());
}

void ds_io_stop(void* io) { delete static_cast<Io*>(io); }
