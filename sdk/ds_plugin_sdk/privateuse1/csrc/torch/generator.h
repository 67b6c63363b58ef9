// Random numbers of a device.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

namespace ds_device {

// The state of a device's generator is a CPU generator's, because the CPU draws for it (see fallback.cpp).
const at::Generator& default_generator(c10::DeviceIndex device);

}  // namespace ds_device
