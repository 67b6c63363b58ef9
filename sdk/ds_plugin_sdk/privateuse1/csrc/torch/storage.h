// Storages of the device.
#pragma once

#include <c10/core/StorageImpl.h>

namespace ds_device {

// Gives a storage other memory of that size; what fits of its contents is kept.
void resize_storage(c10::StorageImpl& storage, std::size_t bytes);

}  // namespace ds_device
