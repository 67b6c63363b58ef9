// What a stream's queue holds.
#pragma once

#include "simulated.h"

namespace runtime {

struct Task {
  std::function<void()> function;
  const char* name;
  bool delayed;  // whether runtime_set_delay() applies: to work, not to marks and waits
};

// Puts a task at the end of the stream's queue.
void submit(Stream stream, Task task);

}  // namespace runtime
