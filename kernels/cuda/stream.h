// How work comes to the kernels of a family. No torch and none of CUDA's headers.
#pragma once

#include <cstdint>

#include <ds_kernels/config.h>

namespace ds_kernels::cuda {

// The stream that a call's kernels are launched on, and memory of its device. An interface, so that kernels are
// compiled without torch: device.h implements it with torch's, native tests with their own.
class Stream {
 public:
  explicit Stream(const char* op) : op_(op) {}

  const char* op() const { return op_; }  // the op's name, for errors
  virtual void* handle() const = 0;       // cudaStream_t

  // Room for so many elements while the call's kernels run, of no particular content; null for none.
  template <class T>
  T* room(int64_t count) const {
    return count == 0 ? nullptr : static_cast<T*>(memory(count * static_cast<int64_t>(sizeof(T))));
  }

 protected:
  ~Stream() = default;
  virtual void* memory(int64_t bytes) const = 0;

 private:
  const char* op_;
};

// Puts a piece of work into the stream. A family's <family>.cu defines, for each kind of work that
// <ds_kernels/<family>.h> has,
//
//   template <> void compute(const NormRows& work, Dtype dtype, const Stream& stream) { ... }
template <class Work>
void compute(const Work& work, Dtype dtype, const Stream& stream);

}  // namespace ds_kernels::cuda
