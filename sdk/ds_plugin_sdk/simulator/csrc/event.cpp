// Events: a mark in a stream's queue, which the stream reaches when all work before it is done.
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "stream.h"

namespace runtime {
namespace {

using Clock = std::chrono::steady_clock;

// One recording of an event. Shared with the queue, so that an event may be recorded anew or destroyed meanwhile.
class Mark {
 public:
  void reach() {
    const std::lock_guard<std::mutex> lock(mutex_);
    time_ = Clock::now();
    reached_ = true;
    change_.notify_all();
  }

  bool reached() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }

  Clock::time_point wait() const {
    std::unique_lock<std::mutex> lock(mutex_);
    change_.wait(lock, [&] { return reached_; });
    return time_;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable change_;
  Clock::time_point time_;
  bool reached_ = false;
};

}  // namespace

struct Event {
  std::shared_ptr<Mark> mark;
};

Event* event_create() { return new Event; }

void event_destroy(Event* event) noexcept { delete event; }

void event_record(Event* event, Stream stream) {
  if (forked()) return;  // tensors that a child inherited die there: nothing is left to wait for
  auto mark = std::make_shared<Mark>();
  submit(stream, {[mark] { mark->reach(); }, "event_record", false});
  event->mark = std::move(mark);
}

bool event_query(const Event* event) { return event->mark == nullptr || forked() || event->mark->reached(); }

void event_synchronize(const Event* event) {
  if (event->mark != nullptr && !forked()) event->mark->wait();
}

void stream_wait_event(Stream stream, const Event* event) {
  if (event->mark == nullptr) return;
  submit(stream, {[mark = event->mark] { mark->wait(); }, "stream_wait_event", false});
}

double event_elapsed_ms(const Event* begin, const Event* end) {
  for (const Event* event : {begin, end})
    if (event->mark == nullptr || !event->mark->reached())
      throw std::runtime_error("elapsed_time: both events must have been recorded and be done: synchronize first");
  return std::chrono::duration<double, std::milli>(end->mark->wait() - begin->mark->wait()).count();
}

}  // namespace runtime
