// The device runtime: everything that the torch backend (csrc/torch) asks of a device.
//
// A vendor implements these functions by calls into their driver; the simulated runtime of the SDK implements them on
// host memory and threads. Each comment names the function of CUDA's driver that does the same, where there is one.
//
// All functions may be called from any thread. What cannot be done is thrown as a std::runtime_error. A function marked
// optional may be left out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

// Weak, so that a library that uses the runtime links without it: the runtime is loaded first and serves all of them.
#define RUNTIME_API __attribute__((visibility("default"), weak))

// Makes the runtime ready, once in a process, before anything else is called.
//
// name: torch's name of the device. Returns nullptr, or why it failed, in a string that lives for ever.
// Hardware: load the driver, cuInit().
extern "C" RUNTIME_API const char* runtime_start(const char* name);

// Optional. Whether this process is a child by fork() of one that used the device, and cannot use it. Without this
// function every forked child counts as one.
extern "C" RUNTIME_API bool runtime_forked();

// Optional, and for tests: lets every piece of work on every stream begin so much later than it could, until called
// again. A missing wait then shows as a wrong result each time rather than once a month. Hardware lacks it.
extern "C" RUNTIME_API void runtime_set_delay(std::int64_t microseconds);

namespace runtime {

// ---------------------------------------------------------------------------------------------------------- devices

// How many devices this process may use. Read anew each time: <NAME>_VISIBLE_DEVICES may change, and launchers change
// it. Never throws; a driver that cannot answer means 0. Hardware: cuDeviceGetCount().
RUNTIME_API int device_count() noexcept;

// The device of the calling thread, 0 at first. Hardware: cuCtxGetCurrent().
RUNTIME_API int current_device() noexcept;

// Throws if there is no such device. Hardware: cuCtxSetCurrent().
RUNTIME_API void set_device(int device);

// Bytes that malloc could still give, and all bytes of the device. Hardware: cuMemGetInfo().
struct MemoryInfo {
  std::size_t free, total;
};
RUNTIME_API MemoryInfo memory_info(int device);

// --------------------------------------------------------------------------------------------------------- streams

// A queue of work of one device: what is submitted to one stream runs in that order, streams run side by side.
// id 0 is the device's default stream, which always exists and waits for no other. Hardware: CUstream; the id may be
// the driver's pointer.
struct Stream {
  int device = 0;
  std::int64_t id = 0;
};

// A new stream. They are pooled by the caller and never destroyed. Hardware: cuStreamCreateWithPriority(), non-blocking.
RUNTIME_API Stream stream_create(int device, int priority);

// Whether all work submitted so far is done. Hardware: cuStreamQuery().
RUNTIME_API bool stream_query(Stream stream);

// Waits until all work submitted so far is done. Throws what went wrong in it. Hardware: cuStreamSynchronize().
RUNTIME_API void stream_synchronize(Stream stream);

// The same for all streams of a device. Hardware: cuCtxSynchronize().
RUNTIME_API void device_synchronize(int device);

// ---------------------------------------------------------------------------------------------------------- memory

// Device memory, aligned to 512 bytes, or nullptr when there is not enough. The host cannot read or write it.
// Hardware: cuMemAlloc().
RUNTIME_API void* malloc(int device, std::size_t bytes);

// Waits for all work of the device first, because some of it may use the memory. Hardware: cuMemFree(), which does so.
RUNTIME_API void free(void* address);

// Which device's memory this is, -1 for any other address. Hardware: cuPointerGetAttribute().
RUNTIME_API int device_of(const void* address) noexcept;

// Host memory that the device can reach, so that copies to and from it need not keep the caller waiting; nullptr when
// there is not enough. Hardware: cuMemHostAlloc().
RUNTIME_API void* host_malloc(std::size_t bytes);
RUNTIME_API void host_free(void* address);

// Copies when the stream gets there. Host memory must stay valid and unchanged until then, and must come from
// host_malloc unless the caller synchronizes the stream next. DeviceToDevice may cross devices; the caller orders it
// with work on the other one. Hardware: cuMemcpyAsync(), cuMemcpyPeerAsync().
enum class Direction { HostToDevice, DeviceToHost, DeviceToDevice };
RUNTIME_API void memcpy_async(void* to, const void* from, std::size_t bytes, Direction direction, Stream stream);

// Sets bytes when the stream gets there. Hardware: cuMemsetD8Async().
RUNTIME_API void memset_async(void* to, unsigned char value, std::size_t bytes, Stream stream);

// --------------------------------------------------------------------------------------------------------- kernels

// For devices whose kernels are C++ functions on the CPU, as the simulated ones are. The kernels of other devices are
// launched by means of their own, on the stream that launch.h gives.

// Optional. Runs a kernel when the stream gets there. `kernel` holds addresses and numbers by value, never tensors or
// other objects with owners: nothing on the device could release them. `name` lives for ever and shows in errors.
RUNTIME_API void launch(Stream stream, std::function<void()> kernel, const char* name);

// Optional. Where a running kernel finds device memory. Only kernels may call it. Left out where the CPU cannot reach
// device memory: the torch backend then fills, and copies between layouts and dtypes, by way of the host, until the
// vendor has kernels for that (docs/privateuse1.md).
RUNTIME_API void* kernel_address(const void* address);

template <class T>
T* in_kernel(T* address) {
  return static_cast<T*>(kernel_address(const_cast<const std::remove_const_t<T>*>(address)));
}

// ---------------------------------------------------------------------------------------------------------- events

// A point in a stream's work. Hardware: CUevent.
struct Event;
RUNTIME_API Event* event_create();
RUNTIME_API void event_destroy(Event* event) noexcept;

// From now on the event means the work submitted to `stream` so far. Hardware: cuEventRecord().
RUNTIME_API void event_record(Event* event, Stream stream);

// Whether that work is done; true for an event never recorded. Hardware: cuEventQuery().
RUNTIME_API bool event_query(const Event* event);

// Waits until it is done. Hardware: cuEventSynchronize().
RUNTIME_API void event_synchronize(const Event* event);

// Work submitted to `stream` from now on begins after what the event means now. The host does not wait.
// Hardware: cuStreamWaitEvent().
RUNTIME_API void stream_wait_event(Stream stream, const Event* event);

// Milliseconds on the device between two events. Throws if one of them is not recorded or not done.
// Hardware: cuEventElapsedTime().
RUNTIME_API double event_elapsed_ms(const Event* begin, const Event* end);

}  // namespace runtime
