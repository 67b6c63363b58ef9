// io_uring by its system calls: what a thread needs to have several reads and writes with the kernel at once.
#pragma once

#include <cstdint>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#if defined(__NR_io_uring_setup) && defined(__NR_io_uring_enter)
#define DS_KERNELS_HAVE_RING 1
#endif
#endif

#ifdef DS_KERNELS_HAVE_RING

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ds_kernels {

class Ring {
 public:
  // Whether it is usable is told by `operator bool`: kernels before 5.1 and many containers do not allow it.
  explicit Ring(uint32_t entries) {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
    if (fd_ < 0) return;
    submissions_.map(fd_, IORING_OFF_SQ_RING, params.sq_off.array + params.sq_entries * sizeof(uint32_t));
    completions_.map(fd_, IORING_OFF_CQ_RING, params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    requests_.map(fd_, IORING_OFF_SQES, params.sq_entries * sizeof(io_uring_sqe));
    usable_ = submissions_ && completions_ && requests_;
    if (!usable_) return;
    mask_ = params.sq_entries - 1;
    tail_ = submissions_.at<uint32_t>(params.sq_off.tail);
    order_ = submissions_.at<uint32_t>(params.sq_off.array);
    done_head_ = completions_.at<uint32_t>(params.cq_off.head);
    done_tail_ = completions_.at<uint32_t>(params.cq_off.tail);
    done_ = completions_.at<io_uring_cqe>(params.cq_off.cqes);
    done_mask_ = params.cq_entries - 1;
    usable_ = works();
  }
  ~Ring() {
    if (fd_ >= 0) close(fd_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  explicit operator bool() const { return usable_; }

  // Adds a request to those of the next submit(). No more than `entries` may be under way. `memory` says where, and
  // must stay until the request has finished.
  void add(uint64_t name, bool write, int fd, const iovec* memory, int64_t offset) {
    io_uring_sqe& request = next();
    request.opcode = write ? IORING_OP_WRITEV : IORING_OP_READV;
    request.fd = fd;
    request.addr = reinterpret_cast<uint64_t>(memory);
    request.len = 1;
    request.off = static_cast<uint64_t>(offset);
    publish(name);
  }

  // Hands over what was added, and waits until `finished` requests have finished.
  void submit(uint32_t finished) {
    while (added_ > 0 || ready() < finished) {
      const long taken = enter(finished);
      if (taken >= 0) {
        added_ -= static_cast<uint32_t>(taken);
      } else if (errno == EAGAIN || errno == EBUSY) {
        usleep(100);  // the kernel is short of memory, or of room for what has finished
        if (ready() > 0) return;
      } else if (errno != EINTR) {
        // The kernel still writes to memory that others would reuse; what it now refuses, it allowed when this began.
        std::fprintf(stderr, "ds_plugin_sdk: io_uring_enter: %s\n", std::strerror(errno));
        std::abort();
      }
    }
  }

  // Calls `finish(name, result)` for each request that has finished: bytes, or -errno.
  template <class Finish>
  void reap(const Finish& finish) {
    uint32_t head = *done_head_;
    const uint32_t tail = __atomic_load_n(done_tail_, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
      const io_uring_cqe& each = done_[head & done_mask_];
      finish(each.user_data, each.res);
    }
    __atomic_store_n(done_head_, head, __ATOMIC_RELEASE);
  }

 private:
  // Memory that the kernel shares.
  class Shared {
   public:
    ~Shared() {
      if (*this) munmap(start_, size_);
    }
    void map(int fd, uint64_t offset, size_t size) {
      size_ = size;
      start_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
    }
    explicit operator bool() const { return start_ != MAP_FAILED; }
    template <class T>
    T* at(uint32_t offset) const {
      return reinterpret_cast<T*>(static_cast<char*>(start_) + offset);
    }

   private:
    void* start_ = MAP_FAILED;
    size_t size_ = 0;
  };

  // A filter of system calls may allow one of them and not the other.
  bool works() {
    next().opcode = IORING_OP_NOP;
    publish(0);
    if (enter(1) != 1) return false;
    added_ = 0;
    bool finished = false;
    reap([&](uint64_t, int32_t result) { finished = result == 0; });
    return finished;
  }

  io_uring_sqe& next() {
    io_uring_sqe& request = requests_.at<io_uring_sqe>(0)[*tail_ & mask_];
    std::memset(&request, 0, sizeof request);
    return request;
  }

  void publish(uint64_t name) {
    const uint32_t tail = *tail_, place = tail & mask_;
    requests_.at<io_uring_sqe>(0)[place].user_data = name;
    order_[place] = place;
    __atomic_store_n(tail_, tail + 1, __ATOMIC_RELEASE);
    ++added_;
  }

  uint32_t ready() const { return __atomic_load_n(done_tail_, __ATOMIC_ACQUIRE) - *done_head_; }

  long enter(uint32_t finished) const {
    return syscall(__NR_io_uring_enter, fd_, added_, finished, IORING_ENTER_GETEVENTS, nullptr, 0);
  }

  int fd_ = -1;
  bool usable_ = false;
  uint32_t mask_ = 0, done_mask_ = 0, added_ = 0;
  uint32_t *tail_ = nullptr, *order_ = nullptr, *done_head_ = nullptr, *done_tail_ = nullptr;
  io_uring_cqe* done_ = nullptr;
  Shared submissions_, completions_, requests_;
};

}  // namespace ds_kernels

#endif
