// Devices: how many there are, and which one a thread uses.
#include <pthread.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <set>
#include <sstream>
#include <stdexcept>

#include "simulated.h"

namespace runtime {
namespace {

Config& mutable_config() {
  static auto* config = new Config;
  return *config;
}

thread_local int device_of_thread = 0;
std::atomic<bool> is_used{false}, is_forked{false};

// "<NAME>_VISIBLE_DEVICES", as launchers set it.
std::string visible_devices_variable() {
  std::string name = config().name;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
  return name + "_VISIBLE_DEVICES";
}

// How many devices of "0,2,1" exist; as in CUDA, the first that does not ends the list.
int count_listed(const std::string& list, int devices) {
  std::set<int> seen;
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) {
    char* end = nullptr;
    const long index = std::strtol(item.c_str(), &end, 10);
    if (end == item.c_str() || index < 0 || index >= devices || !seen.insert(static_cast<int>(index)).second) break;
  }
  return static_cast<int>(seen.size());
}

}  // namespace

const Config& config() { return mutable_config(); }

void use() noexcept { is_used = true; }

bool forked() noexcept { return is_forked; }

void check_device(int device) {
  if (device < 0 || device >= config().devices)
    throw std::runtime_error(config().name + ": there is no device " + std::to_string(device) + ", only " +
                             std::to_string(config().devices));
}

// Simulated devices are all alike and no other process sees them, so only their number matters, not which they are.
int device_count() noexcept {
  const char* visible = std::getenv(visible_devices_variable().c_str());
  return visible == nullptr ? config().devices : count_listed(visible, config().devices);
}

int current_device() noexcept { return device_of_thread; }

void set_device(int device) {
  const int count = device_count();
  if (device < 0 || device >= count)
    throw std::runtime_error(config().name + ": invalid device " + std::to_string(device) + ": this process sees " +
                             std::to_string(count));
  device_of_thread = device;
}

}  // namespace runtime

extern "C" bool runtime_forked() { return runtime::forked(); }

extern "C" const char* runtime_start(const char* name, int devices, std::size_t bytes_per_device) {
  static std::string failure;
  try {
    runtime::reserve_memory(devices, bytes_per_device);
    runtime::mutable_config() = {name, devices, bytes_per_device};
    pthread_atfork(nullptr, nullptr, [] { runtime::is_forked = runtime::is_used.load(); });
    return nullptr;
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
}
