// Two caching allocators, of device memory and of pinned host memory.
//
// A block goes back to a cache when its tensor dies, not when the device is done with it. On the stream that it was
// allocated for that is safe, because later work there runs later; use on another stream has to be announced
// (record_stream), and the block then waits for that stream. Blocks of one rounded size replace each other and are
// never split.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/llvmMathExtras.h>
#include <pthread.h>

#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "device.h"

namespace ds_device {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::Device, c10::DeviceIndex;

using StreamKey = std::pair<int, std::int64_t>;
StreamKey key_of(runtime::Stream stream) { return {stream.device, stream.id}; }

// Multiples of 512 bytes up to 1 MiB; beyond, an eighth of the next lower power of two, so that sizes repeat.
std::size_t rounded(std::size_t bytes) {
  const std::size_t step = bytes <= (std::size_t{1} << 20) ? 512 : c10::llvm::PowerOf2Floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

// Events on streams that still use a block; done() once all of them are.
class Uses {
 public:
  explicit Uses(const std::set<StreamKey>& streams) {
    for (const auto& [device, id] : streams) events_.push_back(event_after({device, id}));
  }
  Uses(Uses&& other) noexcept = default;
  Uses& operator=(Uses&&) = delete;
  ~Uses() {
    for (runtime::Event* event : events_) runtime::event_destroy(event);
  }

  bool done() const {
    return std::all_of(events_.begin(), events_.end(), [](const auto* event) { return runtime::event_query(event); });
  }
  void wait() const {
    for (const runtime::Event* event : events_) runtime::event_synchronize(event);
  }

 private:
  std::vector<runtime::Event*> events_;
};

struct Block {
  void* address = nullptr;
  std::size_t bytes = 0, requested = 0;
  runtime::Stream stream;        // for which it was allocated
  std::set<StreamKey> borrowers;  // other streams that use it
};

void add(StatArray& stat, std::int64_t amount) {
  Stat& all = stat[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  amount >= 0 ? all.increase(amount) : all.decrease(-amount);
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const auto device = static_cast<DeviceIndex>(runtime::current_device());
    void* address = bytes == 0 ? nullptr : take(bytes, device);
    return {address, address, &release, Device(kDevice, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    const auto stream = current_runtime_stream(static_cast<DeviceIndex>(runtime::device_of(to)));
    runtime::memcpy_async(to, from, bytes, runtime::Direction::DeviceToDevice, stream);
  }

  bool initialized() override { return true; }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  void emptyCache(c10::MempoolId_t /*pool*/) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [device, borrowed] : borrowed_) collect(device, /*wait=*/true);
    for (auto& [device, stats] : stats_) drop_cache(device);
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(data.get());
    if (found == live_.end()) return;  // empty, or memory that somebody else owns
    const StreamKey key = key_of(to_runtime(stream));
    if (key != key_of(found->second.stream)) found->second.borrowers.insert(key);
  }

  DeviceStats getDeviceStats(DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    collect(device, /*wait=*/false);
    return stats_[device];
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for_each_stat(stats_[device], [](Stat& stat) { stat.reset_accumulated(); });
    auto& stats = stats_[device];
    stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
  }
  void resetPeakStats(DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for_each_stat(stats_[device], [](Stat& stat) { stat.reset_peak(); });
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(DeviceIndex device) override {
    const auto info = runtime::memory_info(device);
    return {info.free, info.total};
  }

 private:
  static DeviceAllocator& self() { return *static_cast<DeviceAllocator*>(device_allocator()); }
  static void release(void* address) {
    if (address != nullptr) self().give_back(address);
  }

  void* take(std::size_t requested, DeviceIndex device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const runtime::Stream stream = current_runtime_stream(device);
    const std::size_t bytes = rounded(requested);
    void* address = find_cached(bytes, stream);
    if (address == nullptr) address = reserve(bytes, stream, requested);
    const Block& block = live_[address] = {address, bytes, requested, stream, {}};
    count_allocated(block, 1);
    count_active(block, 1);
    return address;
  }

  void* find_cached(std::size_t bytes, runtime::Stream stream) {
    collect(static_cast<DeviceIndex>(stream.device), /*wait=*/false);
    auto& cached = cache_[stream.device][{key_of(stream), bytes}];
    if (cached.empty()) return nullptr;
    void* address = cached.back();
    cached.pop_back();
    return address;
  }

  // New memory from the runtime; if there is none, once more without the caches.
  void* reserve(std::size_t bytes, runtime::Stream stream, std::size_t requested) {
    const auto device = static_cast<DeviceIndex>(stream.device);
    DeviceStats& stats = stats_[device];
    void* address = runtime::malloc(device, bytes);
    if (address == nullptr) {
      ++stats.num_alloc_retries;
      collect(device, /*wait=*/true);
      drop_cache(device);
      address = runtime::malloc(device, bytes);
    }
    if (address == nullptr) out_of_memory(device, requested);
    ++stats.num_device_alloc;
    add(stats.segment, 1);
    add(stats.reserved_bytes, static_cast<std::int64_t>(bytes));
    return address;
  }

  [[noreturn]] void out_of_memory(DeviceIndex device, std::size_t requested) {
    ++stats_[device].num_ooms;
    const auto info = runtime::memory_info(device);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory on ", Device(kDevice, device), ": ", requested,
                     " bytes were asked for, ", info.free, " of ", info.total, " are free");
    std::abort();  // never reached: the check throws
  }

  void give_back(void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(address);
    if (found == live_.end()) return;
    Block block = std::move(found->second);
    live_.erase(found);
    count_allocated(block, -1);
    if (block.borrowers.empty()) {
      to_cache(block);
    } else {
      Uses uses(block.borrowers);
      borrowed_[static_cast<DeviceIndex>(block.stream.device)].emplace_back(std::move(block), std::move(uses));
    }
  }

  void to_cache(const Block& block) {
    count_active(block, -1);
    cache_[block.stream.device][{key_of(block.stream), block.bytes}].push_back(block.address);
  }

  // Caches the blocks whose borrowers are done.
  void collect(DeviceIndex device, bool wait) {
    auto& borrowed = borrowed_[device];
    for (auto entry = borrowed.begin(); entry != borrowed.end();) {
      if (wait) entry->second.wait();
      if (!entry->second.done()) {
        ++entry;
        continue;
      }
      to_cache(entry->first);
      entry = borrowed.erase(entry);
    }
  }

  void drop_cache(DeviceIndex device) {
    DeviceStats& stats = stats_[device];
    for (auto& [key, addresses] : cache_[device]) {
      while (!addresses.empty()) {
        void* address = addresses.back();
        addresses.pop_back();  // first: an address whose release fails must not be given out again
        runtime::free(address);
        ++stats.num_device_free;
        add(stats.segment, -1);
        add(stats.reserved_bytes, -static_cast<std::int64_t>(key.second));
      }
    }
    cache_[device].clear();
  }

  DeviceStats& stats_of(const Block& block) { return stats_[static_cast<DeviceIndex>(block.stream.device)]; }

  // A block is allocated while its tensor lives, and active until no stream uses it any more.
  void count_allocated(const Block& block, std::int64_t sign) {
    DeviceStats& stats = stats_of(block);
    add(stats.allocation, sign);
    add(stats.allocated_bytes, sign * static_cast<std::int64_t>(block.bytes));
    add(stats.requested_bytes, sign * static_cast<std::int64_t>(block.requested));
  }
  void count_active(const Block& block, std::int64_t sign) {
    DeviceStats& stats = stats_of(block);
    add(stats.active, sign);
    add(stats.active_bytes, sign * static_cast<std::int64_t>(block.bytes));
  }

  template <class Function>
  static void for_each_stat(DeviceStats& stats, Function function) {
    for (StatArray* array : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes,
                             &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      for (Stat& stat : *array) function(stat);
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> live_;
  std::map<int, std::map<std::pair<StreamKey, std::size_t>, std::vector<void*>>> cache_;  // by device; stream and size
  std::map<DeviceIndex, std::list<std::pair<Block, Uses>>> borrowed_;  // dead, but in use on another stream
  std::map<DeviceIndex, DeviceStats> stats_;
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* address = take(rounded(std::max<std::size_t>(bytes, 1)));
    return {address, address, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  bool contains(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return find(address) != live_.end();
  }
  void record(const void* address, runtime::Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = find(address);
    if (found != live_.end()) found->second.streams.insert(key_of(stream));
  }

 private:
  struct Pinned {
    std::size_t bytes = 0;
    std::set<StreamKey> streams;  // that copy to or from it
  };
  using Live = std::map<const char*, Pinned>;

  static PinnedAllocator& self() { return *static_cast<PinnedAllocator*>(pinned_allocator()); }
  static void release(void* address) { self().give_back(static_cast<char*>(address)); }

  Live::iterator find(const void* address) {
    auto found = live_.upper_bound(static_cast<const char*>(address));
    if (found == live_.begin()) return live_.end();
    --found;
    return address < found->first + found->second.bytes ? found : live_.end();
  }

  void* take(std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto best = cache_.end();  // the smallest that is no longer in use, and no more than twice as large
    for (auto entry = cache_.begin(); entry != cache_.end(); ++entry) {
      const bool fits = bytes <= entry->bytes && entry->bytes <= 2 * bytes;
      if (fits && (best == cache_.end() || entry->bytes < best->bytes) && entry->uses.done()) best = entry;
    }
    void* address = nullptr;
    if (best != cache_.end()) {
      address = best->address;
      bytes = best->bytes;
      cache_.erase(best);
    } else {
      address = runtime::host_malloc(bytes);
      if (address == nullptr && !cache_.empty()) {
        free_cache();
        address = runtime::host_malloc(bytes);
      }
    }
    TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "out of pinned memory: ", bytes, " bytes were asked for");
    live_[static_cast<char*>(address)] = {bytes, {}};
    return address;
  }

  void free_cache() {
    for (; !cache_.empty(); cache_.pop_front()) {
      cache_.front().uses.wait();
      runtime::host_free(cache_.front().address);
    }
  }

  void give_back(char* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(address);
    if (found == live_.end()) return;
    cache_.push_back({address, found->second.bytes, Uses(found->second.streams)});
    live_.erase(found);
  }

  struct Cached {
    void* address;
    std::size_t bytes;
    Uses uses;
  };
  std::mutex mutex_;
  Live live_;
  std::list<Cached> cache_;
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  static_cast<DeviceAllocator*>(device_allocator())->recordStream(data, stream);
}

bool is_pinned(const void* address) { return static_cast<PinnedAllocator*>(pinned_allocator())->contains(address); }

void record_pinned(const void* address, runtime::Stream stream) {
  static_cast<PinnedAllocator*>(pinned_allocator())->record(address, stream);
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, device_allocator())

namespace {

// Tensors that a child inherits die there: it must not find an allocator that another thread had locked at the fork.
DeviceAllocator& of_device() { return *static_cast<DeviceAllocator*>(device_allocator()); }
PinnedAllocator& of_host() { return *static_cast<PinnedAllocator*>(pinned_allocator()); }
void lock() { of_device().lock(), of_host().lock(); }
void unlock() { of_device().unlock(), of_host().unlock(); }
[[maybe_unused]] const int at_fork = pthread_atfork(&lock, &unlock, &unlock);

}  // namespace

}  // namespace ds_device
