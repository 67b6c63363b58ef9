// What the files of the simulated runtime share. It needs nothing but runtime.h, so that each file can be replaced while
// the others stay.
#pragma once

#include <stdexcept>
#include <string>

#include "runtime.h"

namespace runtime {

// Throws unless this process sees the device.
inline void check_device(int device) {
  const int count = device_count();
  if (device < 0 || device >= count)
    throw std::runtime_error("invalid device " + std::to_string(device) + ": this process sees " +
                             std::to_string(count));
}

// Whether this process is a fork that cannot use the device, so that there is nothing to wait for or to release.
inline bool forked() { return runtime_forked != nullptr && runtime_forked(); }

}  // namespace runtime
