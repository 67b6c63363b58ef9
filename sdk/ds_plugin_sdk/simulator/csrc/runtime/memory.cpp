// Memory: an address space that the host cannot touch.
//
// Two ranges of equal size are reserved. Addresses of the first are what malloc() returns and what tensors show; its
// pages have no access rights, so that a host that follows such an address dies by SIGSEGV. The second, at a fixed
// distance, holds the bytes; only copies and kernels, which run on streams, go there.
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "simulated.h"

namespace runtime {
namespace {

// Allocations are whole pages, so that giving one back to the system takes nothing from its neighbours.
constexpr std::size_t kPage = 4096;

std::size_t rounded(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

struct AddressSpace {
  char* device = nullptr;  // what the host sees
  char* kernel = nullptr;  // where the bytes are
  std::size_t bytes = 0;

  bool contains(const void* address) const {
    return address >= device && address < device + bytes;
  }
};
AddressSpace space;

char* reserve(std::size_t bytes, int rights) {
  void* range = mmap(nullptr, bytes, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED)
    throw std::runtime_error("cannot reserve " + std::to_string(bytes >> 20) + " MiB of address space: " +
                             std::strerror(errno) + "; try fewer devices or less memory");
  return static_cast<char*>(range);
}

// The memory of one device: first fit over the gaps between allocations.
class Pool {
 public:
  explicit Pool(char* begin, std::size_t bytes) : begin_(begin), bytes_(bytes) {}

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
    madvise(static_cast<char*>(kernel_address(address)), found->second, MADV_DONTNEED);
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
  char* begin_;
  std::size_t bytes_, taken_ = 0;
};

std::vector<Pool*>& pools() {
  static auto* all = new std::vector<Pool*>;
  return *all;
}

Pool& pool(int device) {
  check_device(device);
  return *pools()[device];
}

void check_side(const void* address, std::size_t bytes, bool on_device) {
  const int device = device_of(address);
  if ((device >= 0) != on_device)
    throw std::runtime_error(on_device ? "copy: a host address where a device address is expected"
                                       : "copy: a device address where a host address is expected");
  if (on_device) pool(device).check(static_cast<const char*>(address), bytes);
}

}  // namespace

void reserve_memory(int devices, std::size_t bytes_per_device) {
  bytes_per_device = rounded(bytes_per_device);
  const std::size_t bytes = devices * bytes_per_device;
  space = {reserve(bytes, PROT_NONE), reserve(bytes, PROT_READ | PROT_WRITE), bytes};
  madvise(space.kernel, bytes, MADV_DONTDUMP);
  for (int device = 0; device < devices; ++device)
    pools().push_back(new Pool(space.device + device * bytes_per_device, bytes_per_device));
}

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
  if (!space.contains(address)) return -1;
  const std::size_t per_device = space.bytes / pools().size();
  return static_cast<int>((static_cast<const char*>(address) - space.device) / per_device);
}

void* kernel_address(const void* address) {
  if (!space.contains(address)) throw std::runtime_error("a kernel uses an address that is not device memory");
  return space.kernel + (static_cast<const char*>(address) - space.device);
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
