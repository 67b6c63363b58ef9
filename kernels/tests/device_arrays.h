// Arrays on a CUDA device, or on the host in its place, between guards that must stay as they are.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include <ds_kernels/config.h>

#include "../cuda/stream.h"
#include "check.h"

namespace ds_kernels {

inline const char* name_of(Dtype dtype) {
  return dtype == Dtype::Float32 ? "float32" : dtype == Dtype::BFloat16 ? "bfloat16" : "float16";
}

inline double widen(Dtype dtype, const unsigned char* at) {
  if (dtype == Dtype::Float32) {
    float x;
    std::memcpy(&x, at, 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  if (dtype == Dtype::BFloat16) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
  const int exponent = (bits & 0x7fff) >> 10, fraction = bits & 0x3ff;
  const double magnitude = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// Stores a float that the dtype holds exactly: one with few mantissa bits.
inline void put(Dtype dtype, unsigned char* at, float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  const uint16_t brain = static_cast<uint16_t>(wide >> 16);
  const uint16_t half = static_cast<uint16_t>((wide >> 16 & 0x8000) | (wide >> 13 & 0x3ff) |
                                              ((wide >> 23 & 0xff) - 112) << 10);
  if (dtype == Dtype::Float32) std::memcpy(at, &x, 4);
  if (dtype == Dtype::BFloat16) std::memcpy(at, &brain, 2);
  if (dtype == Dtype::Float16) std::memcpy(at, &half, 2);
}

inline size_t guard_bytes = 256;

// A tensor's memory: `offset` elements from an aligned address, with guard bytes before and behind.
class Array {
 public:
  Array(Dtype dtype, int64_t count, int offset) : dtype_(dtype), count_(count), begin_(guard_bytes + offset * size()) {
    host_.assign(begin_ + count * size() + guard_bytes, kGuard);
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

  // The distance of neighbouring values at x.
  double unit(double x) const {
    const int mantissa = dtype_ == Dtype::Float32 ? 23 : dtype_ == Dtype::BFloat16 ? 7 : 10;
    return std::ldexp(1, std::ilogb(std::max(std::abs(x), 1e-4)) - mantissa);
  }

 private:
  static constexpr unsigned char kGuard = 0xa5;

  size_t size() const { return dtype_ == Dtype::Float32 ? 4 : 2; }

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
