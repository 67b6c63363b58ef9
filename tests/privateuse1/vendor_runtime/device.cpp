// A vendor's devices: three, whatever is said about simulated ones.
#include <runtime.h>

#include <stdexcept>

namespace runtime {

static thread_local int device_of_thread = 0;

int device_count() noexcept { return 3; }
int current_device() noexcept { return device_of_thread; }
void set_device(int device) {
  if (device < 0 || device >= device_count()) throw std::runtime_error("invalid device " + std::to_string(device));
  device_of_thread = device;
}

}  // namespace runtime

extern "C" const char* runtime_start(const char* /*name*/) { return nullptr; }
