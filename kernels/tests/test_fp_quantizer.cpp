// Quantization to small floating-point numbers, at every level: every number of every format, and the nearest of them.
#include <ds_kernels/fp_quantizer.h>

#include <cmath>
#include <random>
#include <vector>

#include "at_levels.h"
#include "elements.h"

using namespace ds_kernels;
using namespace ds_kernels::cpu;

namespace {

const FpFormat kFormats[] = {{4, 3}, {5, 2}, {4, 7}, {3, 2}, {2, 1}};
const Dtype kDtypes[] = {Dtype::Float32, Dtype::BFloat16, Dtype::Float16};
constexpr float kScale = 0.25f;  // float16 has all numbers of all formats so

double value_of(uint32_t number, const FpFormat& f) {
  const uint32_t magnitude = number & f.most();
  const int exponent = static_cast<int>(magnitude >> f.mantissa), one = 1 << f.mantissa;
  const double size = std::ldexp(one + static_cast<int>(magnitude % one), exponent - ((1 << (f.exponent - 1)) - 1) - f.mantissa);
  return (magnitude ? size : 0) * (number >> (f.bits() - 1) ? -1 : 1);
}

// Numbers with an exponent of 0 are read, and but for 0 itself never stored.
bool is_stored(uint32_t number, const FpFormat& f) {
  return (number & f.most()) == 0 || (number & f.most()) >= f.least();
}

std::vector<uint8_t> packed(const std::vector<uint32_t>& numbers, const FpFormat& f, float scale) {
  std::vector<uint8_t> bytes(fp_row_bytes(static_cast<int64_t>(numbers.size()), f));
  for (size_t i = 0; i < numbers.size() * f.bits(); ++i) {
    if (numbers[i / f.bits()] >> (i % f.bits()) & 1) bytes[i / 8] = static_cast<uint8_t>(bytes[i / 8] | 1 << (i % 8));
  }
  fp_store_scale(scale, bytes.data() + bytes.size() - kScaleBytes);
  return bytes;
}

void test_every_number(AtLevel compute, const FpFormat& f, Dtype dtype) {
  std::vector<uint32_t> all(size_t{1} << f.bits());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint32_t>(i);
  const auto size = static_cast<int64_t>(all.size());
  std::vector<uint8_t> bytes = packed(all, f, kScale);
  Elements values(dtype, all.size());
  compute(FpDequantizeGroups{bytes.data(), values.data(), 1, size, f}, dtype);
  for (size_t i = 0; i < all.size(); ++i) {
    const double want = kScale * value_of(all[i], f);
    CHECK(values[i] == want, "number %zu of %d bits is %g, not %g", i, f.bits(), values[i], want);
    if (!is_stored(all[i], f)) all[i] = 0, values.set(i, 0);
  }
  std::vector<uint8_t> again(bytes.size(), 99);
  compute(FpQuantizeGroups{values.data(), nullptr, again.data(), 1, size, f}, dtype);
  CHECK(again == packed(all, f, kScale), "%d bits do not come back", f.bits());
}

// Of random values each gets the nearest number: at most half the distance of two away, in double.
void test_nearest(AtLevel compute, const FpFormat& f, Dtype dtype) {
  constexpr int64_t kGroups = 7, kSize = 72;  // more than a block, and no whole number of them
  std::mt19937 random(3);
  Elements x(dtype, kGroups * kSize), back(dtype, kGroups * kSize);
  const double largest = value_of(f.most(), f);
  const int steps = dtype == Dtype::BFloat16 ? 128 : 1024;
  for (int64_t i = 0; i < kGroups * kSize; ++i) {
    const auto part = static_cast<float>(static_cast<int>(random() % (2 * steps)) - steps) / static_cast<float>(steps);
    x.set(i, i % kSize == 40 ? static_cast<float>(kScale * largest) : part * std::ldexp(1.f, int(random() % 3)) * kScale);
  }
  std::vector<uint8_t> stored(kGroups * fp_row_bytes(kSize, f));
  compute(FpQuantizeGroups{x.data(), nullptr, stored.data(), kGroups, kSize, f}, dtype, Shares(3));
  compute(FpDequantizeGroups{stored.data(), back.data(), kGroups, kSize, f}, dtype, Shares(2));
  for (int64_t i = 0; i < kGroups * kSize; ++i) {
    const double v = x[i] / kScale, got = back[i] / kScale, least = value_of(f.least(), f);
    if (v != 0 && std::abs(v) < least) {  // none but 0 lies below the least, and only 0 becomes 0
      CHECK(got == std::copysign(least, v), "%d bits: %g became %g", f.bits(), v, got);
      continue;
    }
    const double allowed = v == 0 ? 0 : std::ldexp(0.5, std::ilogb(std::abs(v)) - f.mantissa);
    CHECK(std::abs(got - std::min(v, largest)) <= allowed, "%d bits: %g became %g", f.bits(), v, got);
  }
}

void test_not_finite(AtLevel compute, const FpFormat& f) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> x(16, 1.f), back(16);
    x[3] = bad;
    std::vector<uint8_t> stored(2 * fp_row_bytes(8, f));
    compute(FpQuantizeGroups{x.data(), nullptr, stored.data(), 2, 8, f}, Dtype::Float32);
    compute(FpDequantizeGroups{stored.data(), back.data(), 2, 8, f}, Dtype::Float32);
    CHECK(!std::isfinite(back[3]) || std::isnan(back[0]), "%g became %g", bad, back[3]);
    CHECK(std::abs(back[8] - 1) < 1e-6, "the next group's 1 became %g", back[8]);
  }
}

// Noise of 0 rounds down, of nearly 1 up.
void test_noise(AtLevel compute, const FpFormat& f) {
  const double least = value_of(f.least(), f), step = std::ldexp(least, -f.mantissa);
  std::vector<float> x(8, static_cast<float>(least + step / 4)), noise{0, 0, 0.7f, 0.8f, 0.9f, 0, 0.99f, 0}, back(8);
  x[7] = static_cast<float>(value_of(f.most(), f));
  std::vector<uint8_t> stored(fp_row_bytes(8, f));
  compute(FpQuantizeGroups{x.data(), noise.data(), stored.data(), 1, 8, f}, Dtype::Float32);
  compute(FpDequantizeGroups{stored.data(), back.data(), 1, 8, f}, Dtype::Float32);
  for (int i = 0; i < 7; ++i) {
    const double want = noise[i] < 0.75f ? least : least + step;
    CHECK(back[i] == want, "%d bits: noise %g gave %g, not %g", f.bits(), noise[i], back[i], want);
  }
}

}  // namespace

int main() {
  at_all_levels<FpQuantizeGroups>([](AtLevel compute) {
    for (const FpFormat& format : kFormats) {
      for (const Dtype dtype : kDtypes) {
        test_every_number(compute, format, dtype);
        test_nearest(compute, format, dtype);
      }
      test_not_finite(compute, format);
      test_noise(compute, format);
    }
  });
  return report();
}
