// Memory: an address space that the host cannot touch.
//
// Each device has two ranges of equal size. Addresses of the first are what malloc() returns and what tensors show; its
// pages have no access rights, so that a host that follows such an address dies by SIGSEGV. The second, at a fixed
// distance, holds the bytes; only copies and kernels, which run on streams, go there.
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "simulated.h"

namespace runtime {
namespace {

// Allocations are whole pages, so that giving one back to the system takes nothing from its neighbours.
constexpr std::size_t kPage = 4096;

// torch counts devices in a signed byte.
constexpr int kMaxDevices = 128;

std::size_t bytes_per_device = std::size_t{1} << 30;  // until simulator_set_memory() says otherwise

std::size_t rounded(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

char* reserve(std::size_t bytes, int rights) {
  void* range = mmap(nullptr, bytes, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED)
    throw std::runtime_error("cannot reserve " + std::to_string(bytes >> 20) + " MiB of address space: " +
                             std::strerror(errno) + "; try less memory");
  return static_cast<char*>(range);
}

// The memory of one device: first fit over the gaps between allocations.
class Pool {
 public:
  explicit Pool(std::size_t bytes)
      : begin_(reserve(bytes, PROT_NONE)), kernel_(reserve(bytes, PROT_READ | PROT_WRITE)), bytes_(bytes) {
    madvise(kernel_, bytes, MADV_DONTDUMP);
  }

  bool contains(const void* address) const { return address >= begin_ && address < begin_ + bytes_; }

  void* kernel_address(const void* address) const { return kernel_ + (static_cast<const char*>(address) - begin_); }

  void* take(std::size_t wanted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    char* gap = begin_;
    for (auto used = live_.begin();; ++used) {
      char* end = used == live_.end() ? begin_ + bytes_ : used->first;
      if (static_cast<std::size_t>(end - gap) >= wanted) {
        live_.emplace_hint(used, gap, wanted);
        taken_ += wanted;
        return gap;
      }
      if (used == live_.end()) return nullptr;
      gap = used->first + used->second;
    }
  }

  void give_back(void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(static_cast<char*>(address));
    if (found == live_.end()) throw std::runtime_error("free: not the begin of an allocation");
    taken_ -= found->second;
    // Lets the system have the pages back; who gets this memory next finds other contents.
    madvise(kernel_address(address), found->second, MADV_DONTNEED);
    live_.erase(found);
  }

  // Throws unless [address, address + bytes) lies inside one allocation.
  void check(const char* address, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.upper_bound(const_cast<char*>(address));
    if (found == live_.begin() || address + bytes > std::prev(found)->first + std::prev(found)->second)
      throw std::runtime_error("invalid access to device memory: " + std::to_string(bytes) +
                               " bytes that are not inside one allocation");
  }

  MemoryInfo info() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {bytes_ - taken_, bytes_};
  }

 private:
  std::mutex mutex_;
  std::map<char*, std::size_t> live_;  // begin and bytes of each allocation
  char* const begin_;   // what the host sees
  char* const kernel_;  // where the bytes are
  const std::size_t bytes_;
  std::size_t taken_ = 0;
};

std::array<std::atomic<Pool*>, kMaxDevices> pools{};

// The pool of a device, made at its first use. Those that exist stay, also when the device is hidden later.
Pool& pool(int device) {
  static std::mutex mutex;
  if (device < 0 || device >= kMaxDevices || pools[device] == nullptr) {
    check_device(device);
    const std::lock_guard<std::mutex> lock(mutex);
    if (pools[device] == nullptr) pools[device] = new Pool(rounded(bytes_per_device));
  }
  return *pools[device];
}

void check_side(const void* address, std::size_t bytes, bool on_device) {
  const int device = device_of(address);
  if ((device >= 0) != on_device)
    throw std::runtime_error(on_device ? "copy: a host address where a device address is expected"
                                       : "copy: a device address where a host address is expected");
  if (on_device) pool(device).check(static_cast<const char*>(address), bytes);
}

}  // namespace

MemoryInfo memory_info(int device) { return pool(device).info(); }

void* malloc(int device, std::size_t bytes) { return pool(device).take(rounded(bytes)); }

void free(void* address) {
  if (address == nullptr || forked()) return;
  const int device = device_of(address);
  if (device < 0) throw std::runtime_error("free: not device memory");
  device_synchronize(device);
  pool(device).give_back(address);
}

int device_of(const void* address) noexcept {
  for (int device = 0; device < kMaxDevices; ++device) {
    const Pool* found = pools[device];
    if (found != nullptr && found->contains(address)) return device;
  }
  return -1;
}

void* kernel_address(const void* address) {
  const int device = device_of(address);
  if (device < 0) throw std::runtime_error("a kernel uses an address that is not device memory");
  return pool(device).kernel_address(address);
}

void* host_malloc(std::size_t bytes) { return std::aligned_alloc(kPage, rounded(bytes)); }

void host_free(void* address) { std::free(address); }

void memcpy_async(void* to, const void* from, std::size_t bytes, Direction direction, Stream stream) {
  if (bytes == 0) return;
  check_side(to, bytes, direction != Direction::DeviceToHost);
  check_side(from, bytes, direction != Direction::HostToDevice);
  void* target = direction == Direction::DeviceToHost ? to : kernel_address(to);
  const void* source = direction == Direction::HostToDevice ? from : kernel_address(from);
  launch(stream, [=] { std::memmove(target, source, bytes); }, "memcpy");
}

void memset_async(void* to, unsigned char value, std::size_t bytes, Stream stream) {
  if (bytes == 0) return;
  check_side(to, bytes, true);
  void* target = kernel_address(to);
  launch(stream, [=] { std::memset(target, value, bytes); }, "memset");
}

}  // namespace runtime

extern "C" RUNTIME_API void simulator_set_memory(std::size_t bytes) { runtime::bytes_per_device = bytes; }
