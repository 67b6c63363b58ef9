// What the files of the simulated runtime share. Nothing outside this folder includes it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "runtime.h"

namespace runtime {

// What runtime_start() was told.
struct Config {
  std::string name = "device";
  int devices = 0;
  std::size_t bytes_per_device = 0;
};
const Config& config();

// Reserves the address space of all devices; throws if the system refuses.
void reserve_memory(int devices, std::size_t bytes_per_device);

// Says that this process uses the device from now on: it has given work to a stream.
void use() noexcept;

// Whether this process is a child by fork() of one that used the device. Threads do not survive a fork, so neither do
// streams: as on hardware, such a child cannot use the device.
bool forked() noexcept;

// Throws unless `device` is one of those simulated.
void check_device(int device);

}  // namespace runtime
