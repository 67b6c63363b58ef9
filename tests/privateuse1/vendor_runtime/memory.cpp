// A vendor's memory: no address of it means anything to the CPU, and there is no kernel_address() to change that.
#include <runtime.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace runtime {
namespace {

constexpr std::size_t kTotal = std::size_t{512} << 20;
constexpr std::uintptr_t kDeviceBit = std::uintptr_t{1} << 60;  // no processor follows such an address

struct Allocation {
  std::size_t bytes;
  int device;
};
std::mutex mutex;
std::map<std::uintptr_t, Allocation> allocations;
std::map<int, std::size_t> used;

bool on_device(const void* address) { return (reinterpret_cast<std::uintptr_t>(address) & kDeviceBit) != 0; }
void* bytes_at(const void* address) {
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(address) & ~kDeviceBit);
}

// The driver's call, which returns when it is done. While streams are simulated, it has to be made when the stream gets
// there.
template <class Call>
void when_the_stream_gets_there(Stream stream, Call call) {
  launch != nullptr ? launch(stream, call, "driver call") : call();
}

}  // namespace

MemoryInfo memory_info(int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  return {kTotal - used[device], kTotal};
}

void* malloc(int device, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (used[device] + bytes > kTotal) return nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(std::aligned_alloc(512, bytes)) | kDeviceBit;
  allocations[address] = {bytes, device};
  used[device] += bytes;
  return reinterpret_cast<void*>(address);
}

void free(void* address) {
  device_synchronize(device_of(address));
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(reinterpret_cast<std::uintptr_t>(address));
  used[found->second.device] -= found->second.bytes;
  allocations.erase(found);
  std::free(bytes_at(address));
}

int device_of(const void* address) noexcept {
  if (!on_device(address)) return -1;
  const std::lock_guard<std::mutex> lock(mutex);
  return std::prev(allocations.upper_bound(reinterpret_cast<std::uintptr_t>(address)))->second.device;
}

void* host_malloc(std::size_t bytes) { return std::aligned_alloc(512, bytes); }
void host_free(void* address) { std::free(address); }

void memcpy_async(void* to, const void* from, std::size_t bytes, Direction /*direction*/, Stream stream) {
  when_the_stream_gets_there(stream, [=] { std::memmove(bytes_at(to), bytes_at(from), bytes); });
}

void memset_async(void* to, unsigned char value, std::size_t bytes, Stream stream) {
  when_the_stream_gets_there(stream, [=] { std::memset(bytes_at(to), value, bytes); });
}

}  // namespace runtime
