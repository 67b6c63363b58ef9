// Devices: how many there are, and which one a thread uses.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <set>
#include <sstream>

#include "simulated.h"

namespace runtime {
namespace {

int devices = 1;  // until simulator_set_devices() says otherwise
thread_local int device_of_thread = 0;

// "<NAME>_VISIBLE_DEVICES", as launchers set it.
std::string& visible_devices_variable() {
  static auto* variable = new std::string;
  return *variable;
}

// How many devices of "0,2,1" exist; as in CUDA, the first that does not ends the list.
int count_listed(const std::string& list) {
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

// Simulated devices are all alike and no other process sees them, so only their number matters, not which they are.
int device_count() noexcept {
  const char* visible = std::getenv(visible_devices_variable().c_str());
  return visible == nullptr ? devices : count_listed(visible);
}

int current_device() noexcept { return device_of_thread; }

void set_device(int device) {
  check_device(device);
  device_of_thread = device;
}

}  // namespace runtime

extern "C" RUNTIME_API void simulator_set_devices(int count) { runtime::devices = count; }

extern "C" const char* runtime_start(const char* name) {
  std::string upper = name;
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  runtime::visible_devices_variable() = upper + "_VISIBLE_DEVICES";
  return nullptr;
}
