// The threads that loops run on, and their memory. An interface, so that a loop is compiled without torch and without
// the standard library: device.h implements it with torch's threads, native tests with their own.
#pragma once

#include <cstddef>
#include <cstdint>

#include <ds_kernels/config.h>

namespace ds_kernels::cpu {

// Items of `elements` elements that make a share worth waking a thread for.
DS_KERNELS_INLINE int64_t grain_of(int64_t elements) {
  constexpr int64_t kElementsPerShare = 16 * 1024;
  return elements < 1 ? kElementsPerShare : elements < kElementsPerShare ? kElementsPerShare / elements : 1;
}

class Threads {
 public:
  // Calls `body(context, first, last, scratch)` on parts of [0, items), none smaller than `grain` if it can be helped;
  // `scratch` has room for so many bytes, zeros at first, and is the calling thread's own.
  using Body = void (*)(const void* context, int64_t first, int64_t last, void* scratch);
  virtual void run(int64_t items, int64_t grain, int64_t scratch_bytes, Body body, const void* context) const = 0;

  // Calls `body(context, tensor, begin, end)` on slices of tensors of so many elements: every element once.
  using SliceBody = void (*)(const void* context, size_t tensor, int64_t begin, int64_t end);
  virtual void run_slices(const int64_t* numels, size_t tensors, SliceBody body, const void* context) const = 0;

  // Room for so many elements, zeros at first, of all threads until the work is done.
  template <class T>
  DS_KERNELS_INLINE T* room(int64_t count) const {
    return static_cast<T*>(memory(count * static_cast<int64_t>(sizeof(T))));
  }

 protected:
  ~Threads() = default;
  virtual void* memory(int64_t bytes) const = 0;
};

}  // namespace ds_kernels::cpu
