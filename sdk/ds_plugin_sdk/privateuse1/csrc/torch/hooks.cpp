// What torch's device-independent parts ask of the device: availability, generators, pinned memory, storage sizes.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <map>
#include <mutex>

#include "device.h"
#include "generator.h"
#include "storage.h"

namespace ds_device {
namespace {

using c10::Device, c10::DeviceIndex;

class GeneratorImpl final : public at::CPUGeneratorImpl {
 public:
  explicit GeneratorImpl(DeviceIndex device, std::uint64_t seed = c10::default_rng_seed_val) : CPUGeneratorImpl(seed) {
    device_ = Device(kDevice, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device_.index(), current_seed());
    copy->set_state(*get_state());
    return copy;
  }
};

DeviceIndex or_current(DeviceIndex device) {
  return device >= 0 ? device : static_cast<DeviceIndex>(runtime::current_device());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return runtime::device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override { return true; }

  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(runtime::device_count()); }
  DeviceIndex getCurrentDevice() const override { return or_current(-1); }
  void setCurrentDevice(DeviceIndex device) const override { runtime::set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex previous = or_current(-1);
    runtime::set_device(device);
    return previous;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? or_current(-1) : exchangeDevice(device);
  }
  Device getDeviceFromPtr(void* address) const override {
    const int device = runtime::device_of(address);
    TORCH_CHECK(device >= 0, "not an address of device memory");
    return Device(kDevice, static_cast<DeviceIndex>(device));
  }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(or_current(device));
  }

  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

const at::Generator& default_generator(DeviceIndex device) {
  static std::mutex mutex;
  static auto* generators = new std::map<DeviceIndex, at::Generator>;
  const std::lock_guard<std::mutex> lock(mutex);
  const DeviceIndex index = or_current(device);
  auto found = generators->find(index);
  if (found == generators->end()) found = generators->emplace(index, at::make_generator<GeneratorImpl>(index)).first;
  return found->second;
}

void resize_storage(c10::StorageImpl& storage, std::size_t bytes) {
  TORCH_CHECK(storage.resizable(), "a storage that is not resizable cannot be resized");
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = device_allocator()->allocate(bytes);
  const std::size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    const c10::Stream stream = current_stream(storage.device().index());
    runtime::memcpy_async(data.get(), storage.data(), kept, runtime::Direction::DeviceToDevice, to_runtime(stream));
    record_stream(storage.data_ptr(), stream);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

}  // namespace ds_device
