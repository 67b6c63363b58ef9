// Files read and written on threads, with io_uring where the kernel allows it and without.
#include "../host/async_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

#ifndef O_DIRECT
#define O_DIRECT 0
#endif

using namespace ds_kernels;

namespace {

// Memory that begins at `shift` bytes after a page, between guards.
class Memory {
 public:
  Memory(int64_t size, int64_t shift) : size_(size) {
    void* whole = nullptr;
    if (posix_memalign(&whole, kIoPage, static_cast<size_t>(size + 2 * kIoPage)) != 0) std::abort();
    whole_ = static_cast<char*>(whole);
    data_ = whole_ + kIoPage + shift;
    fill(0);
    before() = after() = 77;
  }
  ~Memory() {
    CHECK(before() == 77 && after() == 77, "written beyond %lld bytes", static_cast<long long>(size_));
    std::free(whole_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  static char expected(int64_t i, int seed) { return static_cast<char>((i * 31 + i / 4096 + seed) % 251); }
  void fill(int seed) {
    for (int64_t i = 0; i < size_; ++i) data_[i] = seed ? expected(i, seed) : 0;
  }
  bool holds(int seed) const {
    for (int64_t i = 0; i < size_; ++i) {
      if (data_[i] != expected(i, seed)) return false;
    }
    return true;
  }

 private:
  char& before() { return data_[-1]; }
  char& after() { return data_[size_]; }

  const int64_t size_;
  char *whole_, *data_;
};

class File {
 public:
  explicit File(const std::string& name) : path_(std::string(std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp") + "/ds_io_" + std::to_string(getpid()) + name) {
    plain = open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    direct = open(path_.c_str(), O_RDWR | O_DIRECT);
    if (direct < 0) direct = dup(plain);  // a file system without O_DIRECT
  }
  ~File() {
    close(plain);
    close(direct);
    unlink(path_.c_str());
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int plain, direct;

 private:
  const std::string path_;
};

class Threads {
 public:
  Threads(int64_t block, int64_t depth, int64_t threads, int32_t flags) : io_(ds_io_start(block, depth, threads, flags)) {}
  ~Threads() { ds_io_stop(io_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  void* begin(int fd, int fallback, char* memory, int64_t size, int64_t offset, bool write) const {
    return ds_io_submit(io_, fd, fallback, memory, size, offset, write);
  }
  int32_t end(void* operation) const { return ds_io_wait(io_, operation); }
  int32_t run(int fd, int fallback, char* memory, int64_t size, int64_t offset, bool write) const {
    return end(begin(fd, fallback, memory, size, offset, write));
  }
  int64_t rings() const { return ds_io_rings(io_); }

 private:
  void* const io_;
};

// What was written is what is read, whatever sizes, offsets and addresses are: where they do not fit O_DIRECT the other
// descriptor serves.
void test_round_trips(int32_t flags) {
  File file("round");
  int seed = 0;
  for (const int64_t threads : {1, 3}) {
    const Threads io(8192, 3, threads, flags);
    for (const int64_t size : {1, 4096, 12288, 100001}) {
      for (const int64_t offset : {0, 777, 4096}) {
        for (const int64_t shift : {0, 100}) {
          Memory out(size, shift), in(size, shift);
          seed = seed % 200 + 1;  // what is there already has other numbers
          out.fill(seed);
          CHECK(io.run(file.direct, file.plain, out.data(), size, offset, true) == 0, "write %lld", (long long)size);
          CHECK(io.run(file.direct, file.plain, in.data(), size, offset, false) == 0, "read %lld", (long long)size);
          CHECK(in.holds(seed), "%lld bytes at %lld", (long long)size, (long long)offset);
        }
      }
    }
    CHECK(io.run(file.direct, file.plain, nullptr, 0, 0, true) == 0, "nothing to do");
  }
}

// Several operations at once, from several threads, waited for in any order.
void test_many(int32_t flags) {
  constexpr int64_t kSize = 100000;
  File file("many");
  const Threads io(16384, 4, 2, flags);
  std::vector<std::thread> users;
  for (int user = 0; user < 3; ++user) {
    users.emplace_back([&, user] {
      for (int round = 0; round < 2; ++round) {
        std::vector<void*> operations;
        std::vector<std::unique_ptr<Memory>> memories;
        for (int i = 0; i < 6; ++i) {
          memories.push_back(std::make_unique<Memory>(kSize, 0));
          memories.back()->fill(1 + 20 * user + 2 * i + round);
          operations.push_back(
              io.begin(file.direct, file.plain, memories.back()->data(), kSize, (user * 6 + i) * kIoPage * 100, true));
        }
        for (size_t i = operations.size(); i > 0; --i) CHECK(io.end(operations[i - 1]) == 0, "write");
        for (int i = 0; i < 6; ++i) {
          memories[static_cast<size_t>(i)]->fill(0);
          CHECK(io.run(file.direct, file.plain, memories[static_cast<size_t>(i)]->data(), kSize,
                       (user * 6 + i) * kIoPage * 100, false) == 0, "read");
          CHECK(memories[static_cast<size_t>(i)]->holds(1 + 20 * user + 2 * i + round), "user %d, operation %d", user, i);
        }
      }
    });
  }
  for (std::thread& user : users) user.join();
}

void test_errors(int32_t flags) {
  File file("errors");
  const Threads io(4096, 2, 2, flags);
  Memory memory(100000, 0);
  memory.fill(3);
  CHECK(io.run(file.plain, file.plain, memory.data(), 50000, 0, true) == 0, "write");
  CHECK(io.run(file.direct, file.plain, memory.data(), 100000, 0, false) == kIoEndOfFile, "beyond the end");
  CHECK(io.run(file.direct, file.plain, memory.data(), 10, 1 << 20, false) == kIoEndOfFile, "far beyond the end");
  CHECK(io.run(-1, -1, memory.data(), 100000, 0, true) == EBADF, "no descriptor");
  CHECK(io.run(-1, file.plain, memory.data(), 40000, 0, false) == 0, "the other descriptor serves");
  const int full = open("/dev/full", O_WRONLY);
  CHECK(io.run(full, full, memory.data(), 100000, 0, true) == ENOSPC, "a full disk");
  close(full);
  const int only_read = open("/dev/null", O_RDONLY);
  CHECK(io.run(only_read, only_read, memory.data(), 10000, 0, true) == EBADF, "not open for writing");
  close(only_read);
  CHECK(io.run(file.direct, file.plain, memory.data(), 50000, 0, false) == 0, "it goes on after errors");
}

// Threads that are ended right after their work, or had none.
void test_ends() {
  File file("ends");
  Memory memory(1 << 20, 0);
  void* io = ds_io_start(4096, 8, 2, 0);
  void* operation = ds_io_submit(io, file.direct, file.plain, memory.data(), 1 << 20, 0, 1);
  CHECK(ds_io_wait(io, operation) == 0, "write");
  ds_io_stop(io);
  for (int i = 0; i < 20; ++i) ds_io_stop(ds_io_start(4096, 8, 4, i % 2 ? kIoNoRing : 0));
}

}  // namespace

int main() {
  const Threads io(4096, 1, 1, 0);
  std::printf("io_uring: %s\n", io.rings() ? "yes" : "no");
  for (const int32_t flags : {0, kIoOverlap, kIoSingleSubmit, kIoSingleSubmit | kIoOverlap, kIoNoRing}) {
    test_round_trips(flags);
    test_many(flags);
    test_errors(flags);
  }
  test_ends();
  return report();
}
