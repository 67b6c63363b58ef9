// What the files of the torch backend share. They know the device by runtime.h alone, and its name not at all.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <utility>

#include "runtime.h"

namespace ds_device {

// The one device type that torch keeps for devices outside its tree; Python gives it its name.
constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

// --- guard.cpp: streams
inline runtime::Stream to_runtime(c10::Stream stream) { return {stream.device_index(), stream.id()}; }

// The stream that the calling thread uses on a device.
c10::Stream current_stream(c10::DeviceIndex device);

inline runtime::Stream current_runtime_stream(c10::DeviceIndex device) { return to_runtime(current_stream(device)); }

// A new event for what a stream has to do now. Events belong to the device that is current when they are made.
runtime::Event* event_after(runtime::Stream stream);

// --- allocators.cpp: memory
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// Keeps device memory from being reused before the work that `stream` has by the time of its release is done.
void record_stream(const c10::DataPtr& data, c10::Stream stream);

// Whether an address lies in memory of the pinned allocator.
bool is_pinned(const void* address);

// Keeps pinned memory from being reused before the work that `stream` has now is done.
void record_pinned(const void* address, runtime::Stream stream);

}  // namespace ds_device
