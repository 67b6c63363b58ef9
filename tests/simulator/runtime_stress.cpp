// Four threads on two devices, each with streams, events and memory of its own, without torch: for sanitizers.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <runtime.h>

using runtime::Direction;

extern "C" void simulator_set_devices(int count);
extern "C" void simulator_set_memory(std::size_t bytes);

static void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

static void use(int device, int rounds) {
  constexpr std::size_t bytes = 4096;
  runtime::set_device(device);
  const runtime::Stream first = runtime::stream_create(device, 0), second = runtime::stream_create(device, 0);
  runtime::Event* event = runtime::event_create();
  std::vector<unsigned char> host(bytes);
  for (int round = 0; round < rounds; ++round) {
    auto* from = static_cast<unsigned char*>(runtime::malloc(device, bytes));
    auto* to = static_cast<unsigned char*>(runtime::malloc(device, bytes));
    const auto increment = [=] {
      for (std::size_t i = 0; i < bytes; ++i) ++runtime::in_kernel(from)[i];
    };
    runtime::memset_async(from, static_cast<unsigned char>(round), bytes, first);
    runtime::launch(first, increment, "increment");
    runtime::event_record(event, first);
    runtime::stream_wait_event(second, event);
    runtime::memcpy_async(to, from, bytes, Direction::DeviceToDevice, second);
    runtime::memcpy_async(host.data(), to, bytes, Direction::DeviceToHost, second);
    runtime::stream_synchronize(second);
    expect(runtime::event_query(event), "an event is done when a stream that waited for it is");
    for (const unsigned char value : host) expect(value == static_cast<unsigned char>(round + 1), "values arrive");
    runtime::free(from);
    runtime::free(to);
  }
  runtime::event_destroy(event);
  expect(runtime::stream_query(first), "a stream without work is done");
}

int main() {
  constexpr std::size_t memory = 1 << 20;
  simulator_set_devices(2);
  simulator_set_memory(memory);
  expect(runtime_start("sim") == nullptr, "the runtime starts");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(use, i % 2, 200);
  for (std::thread& thread : threads) thread.join();
  runtime::device_synchronize(0);
  expect(runtime::memory_info(1).free == memory, "all memory came back");
  expect(runtime::malloc(0, 2 * memory) == nullptr, "more than there is cannot be had");
  std::printf("ok\n");
}
