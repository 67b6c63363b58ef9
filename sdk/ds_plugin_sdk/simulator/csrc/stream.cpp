// Streams: a queue and a thread each, so that work really runs later, in order within a stream, side by side between
// streams.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "simulated.h"
#include "stream.h"

namespace runtime {
namespace {

std::atomic<std::int64_t> delay_us{0};
std::atomic<bool> is_forked{false};

// Threads do not survive a fork, so neither do streams: as on hardware, the child of a process that has given work to a
// stream cannot use the device.
void use() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { is_forked = true; }); });
}

class Queue {
 public:
  explicit Queue(Stream stream) : stream_(stream) {}

  void submit(Task task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      std::thread([this] { work(); }).detach();  // lives as long as the process; throws where the system has no more
      started_ = true;
    }
    tasks_.push_back(std::move(task));
    ++submitted_;
    has_work_.notify_one();
  }

  bool idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return completed_ == submitted_;
  }

  // Waits for what was submitted before the call, and throws the first thing that went wrong in it.
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::uint64_t goal = submitted_;
    progress_.wait(lock, [&] { return completed_ >= goal; });
    if (!failure_.empty()) throw std::runtime_error(std::exchange(failure_, {}));
  }

 private:
  [[noreturn]] void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      has_work_.wait(lock, [&] { return !tasks_.empty(); });
      {
        const Task task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        const std::string failure = run(task);
        lock.lock();
        if (failure_.empty()) failure_ = failure;
      }
      ++completed_;
      progress_.notify_all();
    }
  }

  // Runs a task; returns what went wrong, if anything.
  std::string run(const Task& task) const {
    try {
      if (task.delayed && delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      task.function();
      return {};
    } catch (const std::exception& error) {
      return std::string("'") + task.name + "' failed on device " + std::to_string(stream_.device) + ", stream " +
             std::to_string(stream_.id) + ": " + error.what();
    }
  }

  const Stream stream_;
  std::mutex mutex_;
  std::condition_variable has_work_, progress_;
  std::deque<Task> tasks_;
  std::uint64_t submitted_ = 0, completed_ = 0;
  std::string failure_;
  bool started_ = false;
};

// All queues, by device and stream. They are never destroyed: their threads may run until the process ends.
struct Table {
  std::mutex mutex;
  std::map<std::pair<int, std::int64_t>, Queue*> queues;
  std::int64_t next_id = 1;
};
Table& table() {
  static auto* table = new Table;
  return *table;
}

Queue& queue(Stream stream) {
  const std::lock_guard<std::mutex> lock(table().mutex);
  const auto found = table().queues.find({stream.device, stream.id});
  if (found != table().queues.end()) return *found->second;
  check_device(stream.device);
  return *(table().queues[{stream.device, stream.id}] = new Queue(stream));
}

std::vector<Queue*> queues_of(int device) {
  const std::lock_guard<std::mutex> lock(table().mutex);
  std::vector<Queue*> found;
  for (const auto& [key, queue] : table().queues)
    if (key.first == device) found.push_back(queue);
  return found;
}

}  // namespace

void submit(Stream stream, Task task) {
  if (is_forked) throw std::runtime_error("this process is a fork of one that used the device; start it with spawn");
  use();
  queue(stream).submit(std::move(task));
}

Stream stream_create(int device, int /*priority: all threads are equal*/) {
  check_device(device);
  const std::lock_guard<std::mutex> lock(table().mutex);
  return {device, table().next_id++};
}

bool stream_query(Stream stream) { return queue(stream).idle(); }

void stream_synchronize(Stream stream) {
  if (!is_forked) queue(stream).drain();
}

void device_synchronize(int device) {
  const std::vector<Queue*> queues = queues_of(device);
  if (queues.empty()) check_device(device);  // one that has had work may be hidden by now
  if (is_forked) return;
  for (Queue* queue : queues) queue->drain();
}

void launch(Stream stream, std::function<void()> kernel, const char* name) {
  submit(stream, {std::move(kernel), name, true});
}

}  // namespace runtime

extern "C" bool runtime_forked() { return runtime::is_forked; }

extern "C" void runtime_set_delay(std::int64_t microseconds) { runtime::delay_us = microseconds; }
