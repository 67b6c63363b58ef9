// Arrays on a CUDA device, or on the host in its place, between guards that must stay as they are.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include <ds_kernels/config.h>

#include "../cuda/stream.h"
#include "check.h"
#include "elements.h"

namespace ds_kernels {

inline const char* name_of(Dtype dtype) {
  return dtype == Dtype::Float32 ? "float32" : dtype == Dtype::BFloat16 ? "bfloat16" : "float16";
}

inline size_t guard_bytes = 256;

// A tensor's memory: `offset` elements from an aligned address, with guard bytes before and behind.
class Array {
 public:
  Array(Dtype dtype, int64_t count, int offset) : dtype_(dtype), count_(count), begin_(guard_bytes + offset * size()) {
    host_.assign(begin_ + count * size() + guard_bytes, kGuard);
    std::fill_n(host_.begin() + static_cast<std::ptrdiff_t>(begin_), count * size(), 0xff);  // NaN until it is written
    cudaMalloc(&device_, host_.size());
  }
  ~Array() { cudaFree(device_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void set(int64_t i, float x) { put(dtype_, host_.data() + begin_ + i * size(), x); }
  double operator[](int64_t i) const { return widen(dtype_, host_.data() + begin_ + i * size()); }
  void to_device() { cudaMemcpy(device_, host_.data(), host_.size(), cudaMemcpyHostToDevice); }
  void from_device() { cudaMemcpy(host_.data(), device_, host_.size(), cudaMemcpyDeviceToHost); }
  void* data() const { return static_cast<char*>(device_) + begin_; }
  int64_t count() const { return count_; }

  bool guards_hold() const {
    for (size_t i = 0; i < host_.size(); ++i) {
      const bool inside = i >= begin_ && i < begin_ + count_ * size();
      if (!inside && host_[i] != kGuard) return false;
    }
    return true;
  }

  double unit(double x) const { return ds_kernels::unit(dtype_, x); }

 private:
  static constexpr unsigned char kGuard = 0xa5;

  size_t size() const { return size_of(dtype_); }

  Dtype dtype_;
  int64_t count_;
  size_t begin_;
  std::vector<unsigned char> host_;
  void* device_ = nullptr;
};

// Memory with so many numbers in it, between guards.
template <class T>
class Numbers {
 public:
  explicit Numbers(const std::vector<T>& values) : count_(values.size()), bytes_(count_ * sizeof(T)) {
    raw_.assign(bytes_ + 2 * guard_bytes, 0x5a);
    if (bytes_) std::memcpy(raw_.data() + guard_bytes, values.data(), bytes_);
    cudaMalloc(&device_, raw_.size());
    cudaMemcpy(device_, raw_.data(), raw_.size(), cudaMemcpyHostToDevice);
  }
  ~Numbers() { cudaFree(device_); }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  T* data() const { return reinterpret_cast<T*>(static_cast<char*>(device_) + guard_bytes); }
  std::vector<T> values(const char* op) {
    CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
    cudaMemcpy(raw_.data(), device_, raw_.size(), cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < raw_.size(); ++i) {
      CHECK((i >= guard_bytes && i < guard_bytes + bytes_) || raw_[i] == 0x5a, "%s: wrote beside its tensor", op);
    }
    std::vector<T> result(count_);
    if (bytes_) std::memcpy(result.data(), raw_.data() + guard_bytes, bytes_);
    return result;
  }

 private:
  size_t count_, bytes_;
  std::vector<unsigned char> raw_;
  void* device_ = nullptr;
};

// The default stream; memory for kernels lies between guards, which its end looks at.
class TestStream final : public cuda::Stream {
 public:
  using Stream::Stream;
  ~TestStream() {
    CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op());
    for (const auto& array : arrays_) {
      array->from_device();
      CHECK(array->guards_hold(), "%s: wrote beside its own memory", op());
    }
  }

  void* handle() const override { return nullptr; }

 private:
  void* memory(int64_t bytes) const override {
    arrays_.push_back(std::make_unique<Array>(Dtype::Float32, (bytes + 3) / 4, 0));
    arrays_.back()->to_device();
    return arrays_.back()->data();
  }

  mutable std::vector<std::unique_ptr<Array>> arrays_;
};

// Does a piece of work and waits for it.
template <class Work>
void compute(const char* op, const Work& work, Dtype dtype) {
  cuda::compute(work, dtype, TestStream(op));
}

}  // namespace ds_kernels
