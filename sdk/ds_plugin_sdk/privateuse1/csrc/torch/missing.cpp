// Which functions of runtime.h the loaded runtime lacks. They are weak, so nothing else would say so before a call of one
// ends the process.
#include <string>

#include "runtime.h"

namespace {

struct Function {
  const void* address;
  const char* declaration;
};

template <class Type>
const void* address_of(Type* function) {
  return reinterpret_cast<const void*>(function);
}

std::string missing_functions() {
  using namespace runtime;
  const Function all[] = {
      {address_of(runtime_start), "extern \"C\" const char* runtime_start(const char*)"},
      {address_of(device_count), "int device_count() noexcept"},
      {address_of(current_device), "int current_device() noexcept"},
      {address_of(set_device), "void set_device(int)"},
      {address_of(memory_info), "MemoryInfo memory_info(int)"},
      {address_of(stream_create), "Stream stream_create(int, int)"},
      {address_of(stream_query), "bool stream_query(Stream)"},
      {address_of(stream_synchronize), "void stream_synchronize(Stream)"},
      {address_of(device_synchronize), "void device_synchronize(int)"},
      {address_of(runtime::malloc), "void* malloc(int, std::size_t)"},
      {address_of(runtime::free), "void free(void*)"},
      {address_of(device_of), "int device_of(const void*) noexcept"},
      {address_of(host_malloc), "void* host_malloc(std::size_t)"},
      {address_of(host_free), "void host_free(void*)"},
      {address_of(memcpy_async), "void memcpy_async(void*, const void*, std::size_t, Direction, Stream)"},
      {address_of(memset_async), "void memset_async(void*, unsigned char, std::size_t, Stream)"},
      {address_of(event_create), "Event* event_create()"},
      {address_of(event_destroy), "void event_destroy(Event*) noexcept"},
      {address_of(event_record), "void event_record(Event*, Stream)"},
      {address_of(event_query), "bool event_query(const Event*)"},
      {address_of(event_synchronize), "void event_synchronize(const Event*)"},
      {address_of(stream_wait_event), "void stream_wait_event(Stream, const Event*)"},
      {address_of(event_elapsed_ms), "double event_elapsed_ms(const Event*, const Event*)"},
  };
  std::string missing;
  for (const Function& each : all) {
    if (!each.address) missing += (missing.empty() ? "" : "; ") + std::string(each.declaration);
  }
  return missing;
}

}  // namespace

// Declarations with "; " between them; empty where there are all.
extern "C" __attribute__((visibility("default"))) const char* ds_device_missing_functions() {
  static const std::string missing = missing_functions();
  return missing.c_str();
}
