// An array of elements of any dtype, read and written as numbers. It has exactly the memory of its elements, so that a
// sanitizer sees what is read or written beyond it.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include <ds_kernels/config.h>

class Elements {
 public:
  Elements(ds_kernels::Dtype dtype, size_t count) : dtype_(dtype), memory_(count * size()) {}

  void* data() { return memory_.data(); }
  size_t count() const { return memory_.size() / size(); }

  double operator[](size_t i) const {
    if (dtype_ == ds_kernels::Dtype::Float32) return read<float>(i);
    const uint16_t bits = read<uint16_t>(i);
    const int mantissa = dtype_ == ds_kernels::Dtype::BFloat16 ? 7 : 10, bias = mantissa == 7 ? 127 : 15;
    const int exponent = (bits & 0x7fff) >> mantissa, fraction = bits & ((1 << mantissa) - 1);
    if (exponent == 2 * bias + 1) return fraction ? NAN : bits & 0x8000 ? -HUGE_VAL : HUGE_VAL;
    const double size = exponent ? std::ldexp(fraction + (1 << mantissa), exponent - bias - mantissa)
                                 : std::ldexp(fraction, 1 - bias - mantissa);
    return bits & 0x8000 ? -size : size;
  }

  // Stores a number with few digits, which every dtype holds exactly.
  void set(size_t i, float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    uint16_t half = static_cast<uint16_t>(wide >> 16);
    if (dtype_ == ds_kernels::Dtype::Float16) {
      half = static_cast<uint16_t>((wide >> 16 & 0x8000) | (wide >> 13 & 0x3ff));
      if (x != 0) half = static_cast<uint16_t>(half | ((wide >> 23 & 0xff) - 112) << 10);
    }
    std::memcpy(&memory_[i * size()], size() == 4 ? static_cast<void*>(&x) : &half, size());
  }

  // The distance of neighbouring numbers at x.
  double unit(double x) const {
    const int mantissa = dtype_ == ds_kernels::Dtype::Float32 ? 23 : dtype_ == ds_kernels::Dtype::BFloat16 ? 7 : 10;
    return std::ldexp(1, std::ilogb(std::max(std::abs(x), 6.2e-5)) - mantissa);
  }

 private:
  size_t size() const { return dtype_ == ds_kernels::Dtype::Float32 ? 4 : 2; }

  template <class T>
  T read(size_t i) const {
    T value;
    std::memcpy(&value, &memory_[i * sizeof(T)], sizeof value);
    return value;
  }

  ds_kernels::Dtype dtype_;
  std::vector<unsigned char> memory_;
};
