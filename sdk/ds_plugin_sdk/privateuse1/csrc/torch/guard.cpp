// The device guard: how torch itself asks for devices, streams and events.
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <map>
#include <mutex>

#include "device.h"

namespace ds_device {
namespace {

using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;

// Streams are cheap to ask for and never destroyed, so they come from a pool, in turn.
class StreamPool {
 public:
  Stream next(DeviceIndex device, int priority) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& [ids, turn] = devices_[{device, priority < 0}];
    StreamId& id = ids[turn++ % ids.size()];
    if (id == 0) id = runtime::stream_create(device, priority).id;
    return Stream(Stream::UNSAFE, Device(kDevice, device), id);
  }

 private:
  struct Ring {
    std::array<StreamId, 16> ids{};
    std::size_t turn = 0;
  };
  std::mutex mutex_;
  std::map<std::pair<DeviceIndex, bool>, Ring> devices_;
};

StreamPool& stream_pool() {
  static auto* pool = new StreamPool;
  return *pool;
}

std::map<DeviceIndex, StreamId>& streams_of_thread() {
  thread_local std::map<DeviceIndex, StreamId> streams;
  return streams;
}

DeviceIndex index_of(Device device) {
  return device.has_index() ? device.index() : static_cast<DeviceIndex>(runtime::current_device());
}

runtime::Event* event_of(void* event) { return static_cast<runtime::Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }

  Device getDevice() const override { return {kDevice, index_of(Device(kDevice))}; }
  Device exchangeDevice(Device device) const override {
    const Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  void setDevice(Device device) const override {
    if (device.has_index() && device.index() != runtime::current_device()) runtime::set_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    try {
      setDevice(device);
    } catch (...) {  // called from destructors: the device that a guard returns to may be hidden by now
    }
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(runtime::device_count()); }
  c10::DeviceCapability getDeviceCapability(Device /*device*/) const override { return {}; }  // every dtype

  Stream getStream(Device device) const override { return current_stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kDevice, index_of(device)));
  }
  Stream getNewStream(Device device, int priority) const override {
    return stream_pool().next(index_of(device), priority);
  }
  Stream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    return getNewStream(device, high_priority ? -1 : 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream previous = current_stream(stream.device_index());
    streams_of_thread()[stream.device_index()] = stream.id();
    return previous;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());  // NOLINT: an opaque number, as to_runtime() takes it
  }
  bool queryStream(const Stream& stream) const override { return runtime::stream_query(to_runtime(stream)); }
  void synchronizeStream(const Stream& stream) const override { runtime::stream_synchronize(to_runtime(stream)); }
  void synchronizeDevice(const DeviceIndex device) const override {
    runtime::device_synchronize(index_of(Device(kDevice, device)));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_stream(data, stream);
  }

  // torch makes an event at its first recording, and hands over a null one until then.
  void record(void** event, const Stream& stream, const DeviceIndex /*device*/, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = event_after(to_runtime(stream));
    } else {
      runtime::event_record(event_of(*event), to_runtime(stream));
    }
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) runtime::stream_wait_event(to_runtime(stream), event_of(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || runtime::event_query(event_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) runtime::event_synchronize(event_of(event));
  }
  void destroyEvent(void* event, const DeviceIndex /*device*/) const noexcept override {
    runtime::event_destroy(event_of(event));
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex /*device*/) const override {
    TORCH_CHECK(begin != nullptr && end != nullptr, "elapsed_time: both events must be recorded first");
    return runtime::event_elapsed_ms(event_of(begin), event_of(end));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

runtime::Event* event_after(runtime::Stream stream) {
  const c10::DeviceGuard guard(Device(kDevice, static_cast<DeviceIndex>(stream.device)));
  runtime::Event* event = runtime::event_create();
  runtime::event_record(event, stream);
  return event;
}

Stream current_stream(DeviceIndex device) {
  const auto found = streams_of_thread().find(device);
  return Stream(Stream::UNSAFE, Device(kDevice, device), found == streams_of_thread().end() ? 0 : found->second);
}

}  // namespace ds_device
