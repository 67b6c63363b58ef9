// Numbers of any dtype in memory, and an array of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <ds_kernels/config.h>

namespace ds_kernels {

inline size_t size_of(Dtype dtype) { return dtype == Dtype::Float32 ? 4 : 2; }

inline double widen(Dtype dtype, const unsigned char* at) {
  uint16_t half = 0;
  if (dtype != Dtype::Float32) std::memcpy(&half, at, 2);
  if (dtype == Dtype::Float16) {
    const int exponent = (half & 0x7fff) >> 10, fraction = half & 0x3ff;
    const double size = exponent == 31 ? (fraction ? NAN : HUGE_VAL)
                        : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                       : std::ldexp(fraction, -24);
    return half & 0x8000 ? -size : size;
  }
  uint32_t wide = uint32_t{half} << 16;
  if (dtype == Dtype::Float32) std::memcpy(&wide, at, 4);
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

// Stores a number that every dtype holds exactly: one with few digits, or one that is not finite.
inline void put(Dtype dtype, unsigned char* at, float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  uint32_t half = wide >> 16;
  if (dtype == Dtype::Float16) {
    const uint32_t exponent = std::isfinite(x) ? (wide >> 23 & 0xff) - 112 : 31;
    half = (half & 0x8000) | (x == 0 ? 0 : exponent << 10 | (wide >> 13 & 0x3ff));
  }
  const auto bits = static_cast<uint16_t>(half);
  std::memcpy(at, dtype == Dtype::Float32 ? static_cast<const void*>(&x) : &bits, size_of(dtype));
}

// The distance of neighbouring numbers at x.
inline double unit(Dtype dtype, double x) {
  const int mantissa = dtype == Dtype::Float32 ? 23 : dtype == Dtype::BFloat16 ? 7 : 10;
  return std::ldexp(1, std::ilogb(std::max(std::abs(x), 6.2e-5)) - mantissa);
}

// An array of elements of any dtype, read and written as numbers. They begin as NaN, so that what is never written
// shows. It has exactly the memory of its elements, so that a sanitizer sees what is read or written beyond it; or so
// many elements before and behind that must stay as they are: one makes addresses that are aligned to nothing else.
class Elements {
 public:
  Elements(Dtype dtype, size_t count, size_t guards = 0)
      : dtype_(dtype), count_(count), begin_(guards * size()), memory_(count * size() + 2 * begin_, 0xff) {
    std::fill_n(memory_.begin(), begin_, kGuard);
    std::fill_n(memory_.end() - static_cast<std::ptrdiff_t>(begin_), begin_, kGuard);
  }

  void* data() { return memory_.data() + begin_; }
  size_t count() const { return count_; }
  size_t size() const { return size_of(dtype_); }
  Dtype dtype() const { return dtype_; }

  double operator[](size_t i) const { return widen(dtype_, memory_.data() + begin_ + i * size()); }
  void set(size_t i, float x) { put(dtype_, memory_.data() + begin_ + i * size(), x); }
  double unit(double x) const { return ds_kernels::unit(dtype_, x); }

  bool guards_hold() const {
    const auto held = [](unsigned char byte) { return byte == kGuard; };
    const auto end = static_cast<std::ptrdiff_t>(begin_);
    return std::all_of(memory_.begin(), memory_.begin() + end, held) &&
           std::all_of(memory_.end() - end, memory_.end(), held);
  }

 private:
  static constexpr unsigned char kGuard = 0xa5;

  Dtype dtype_;
  size_t count_, begin_;
  std::vector<unsigned char> memory_;
};

}  // namespace ds_kernels
