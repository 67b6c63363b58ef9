// The quantizer's loops at every level against the formulas in double.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <ds_kernels/quantizer.h>

#include "at_levels.h"

using namespace ds_kernels;
using cpu::AtLevel;

namespace {

// Bytes at an odd address, with guards before and behind.
class Bytes {
 public:
  explicit Bytes(size_t size) : memory_(size + 2, kGuard) {}
  unsigned char* data() { return memory_.data() + 1; }
  bool guards_hold() const { return memory_.front() == kGuard && memory_.back() == kGuard; }
  unsigned char operator[](size_t i) const { return memory_[i + 1]; }

 private:
  static constexpr unsigned char kGuard = 0xa5;
  std::vector<unsigned char> memory_;
};

// Level `i` as it lies in memory.
int level(const Bytes& levels, size_t i, int bits) {
  if (bits == 8) return static_cast<int8_t>(levels[i]);
  const int nibble = i % 2 ? levels[i / 2] & 15 : levels[i / 2] >> 4;
  return nibble >= 8 ? nibble - 16 : nibble;
}

// Multiples of 1/256 within [-1, 1], both ends among them: levels without rounding errors, ties included.
std::vector<float> values(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> result(count);
  for (float& x : result) x = float(static_cast<int>(random() % 513) - 256) / 256.f;
  if (count) result.front() = 1;
  if (count > 1) result.back() = -1;
  return result;
}

double half_even(double x) { return x - std::remainder(x, 1.0); }

int expected_level(double x, double scale, double offset, int bits) {
  const double top = (1 << (bits - 1)) - 1;
  return static_cast<int>(std::fmin(std::fmax(half_even((x - offset) * scale), -top - 1), top));
}

template <class Test>
void in_all_cases(Test test) {
  cpu::at_all_levels<QuantizeGroups>([&](AtLevel compute) {
    for (const int bits : {8, 4}) {
      for (const bool symmetric : {true, false}) {
        for (const size_t count : {2, 4, 6, 14, 16, 18, 30, 32, 34, 62, 64, 66, 1026}) {
          test(compute, static_cast<int>(compute.level), Levels{bits, symmetric}, count);
          if (bits == 8) test(compute, static_cast<int>(compute.level), Levels{bits, symmetric}, count - 1);
        }
      }
    }
  });
}

void test_quantize_and_back(AtLevel compute, int where, Levels as, size_t count) {
  const auto [bits, symmetric] = as;
  const std::vector<float> x = values(count, 1);
  Bytes levels(count * bits / 8), back(count * 4);
  float params[2] = {};
  const auto n = static_cast<int64_t>(count);
  compute(QuantizeGroups{x.data(), levels.data(), params, 1, n, as, {}}, Dtype::Float32);
  const double span = symmetric || count > 1 ? 2 : 0, offset = symmetric || count > 1 ? 0 : 1;
  const double scale = span == 0 ? 1 : (1 << bits) / span;
  CHECK(params[0] == 1 / scale && (symmetric || params[1] == offset), "level %d, %zu elements: params", where, count);
  for (size_t i = 0; i < count; ++i) {
    const int want = expected_level(x[i], scale, offset, bits);
    CHECK(level(levels, i, bits) == want, "level %d, %d bits, %zu elements: %zu is %d, expected %d", where, bits, count,
          i, level(levels, i, bits), want);
  }
  compute(DequantizeGroups{levels.data(), params, back.data(), 1, n, as}, Dtype::Float32);
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, back.data() + 4 * i, 4);
    CHECK(value == level(levels, i, bits) / scale + offset, "level %d: value %zu", where, i);
  }
  CHECK(levels.guards_hold() && back.guards_hold(), "level %d, %d bits, %zu elements", where, bits, count);
}

// Three devices send groups that are not those of the sum.
void test_reduce(AtLevel compute, int where, Levels as, size_t count) {
  const auto [bits, symmetric] = as;
  if (count % 2) return;
  const int64_t devices = 3, group = static_cast<int64_t>(count), n = 4 * group;
  const int columns = symmetric ? 1 : 2;
  std::mt19937 random(2);
  Bytes sent(static_cast<size_t>(devices * n * bits / 8)), out(static_cast<size_t>(n * bits / 8));
  for (int64_t i = 0; i < devices * n * bits / 8; ++i) sent.data()[i] = static_cast<unsigned char>(random());
  std::vector<float> params(static_cast<size_t>(devices * 4 * columns));
  for (float& p : params) p = float(1 + random() % 8) / 8;
  std::vector<double> total(static_cast<size_t>(n));
  for (int64_t device = 0; device < devices; ++device) {
    for (int64_t i = 0; i < n; ++i) {
      const float* p = params.data() + (device * 4 + i / group) * columns;
      const size_t from = static_cast<size_t>(device * n + i);
      total[static_cast<size_t>(i)] += level(sent, from, bits) * double(p[0]) + (symmetric ? 0 : p[1]);
    }
  }
  for (const int64_t groups : {1, 2}) {
    const int64_t size = n / groups;
    std::vector<float> results(static_cast<size_t>(groups * columns));
    compute(ReduceGroups{sent.data(), params.data(), devices, group, out.data(), results.data(), groups, size, as},
            kAnyDtype);
    for (int64_t i = 0; i < n; ++i) {
      const float* result = results.data() + i / size * columns;
      const double value = level(out, static_cast<size_t>(i), bits) * double(result[0]) + (symmetric ? 0 : result[1]);
      const double error = std::abs(value - total[static_cast<size_t>(i)]);
      CHECK(error <= result[0] * 1.001, "level %d, %d bits: %lld is %g, expected %g", where, bits,
            static_cast<long long>(i), value, total[static_cast<size_t>(i)]);
    }
  }
  CHECK(out.guards_hold(), "level %d, %d bits, %zu elements", where, bits, count);
}

void test_dequantize_range(AtLevel compute, int where, Levels as, size_t count) {
  const int bits = as.bits;
  std::mt19937 random(3);
  Bytes levels(count * bits / 8), out(count * 4);
  for (size_t i = 0; i < count * bits / 8; ++i) levels.data()[i] = static_cast<unsigned char>(random());
  const float scale = 4, minimum = -1.5f;
  compute(DequantizeRangeGroups{levels.data(), &scale, &minimum, out.data(), 1, static_cast<int64_t>(count), bits},
          Dtype::Float32);
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, out.data() + 4 * i, 4);
    const int want = bits == 8 ? levels[i] : level(levels, i, bits) & 15;
    CHECK(value == want / 4.0 - 1.5, "level %d, %d bits: %zu is %g", where, bits, i, value);
  }
  CHECK(out.guards_hold(), "level %d, %zu elements", where, count);
}

void test_fake_quantize(AtLevel compute, int where, Levels as, size_t count) {
  const auto [bits, symmetric] = as;
  const std::vector<float> before = values(count, 4), noise(count, 0.999f);
  for (const float* random : {static_cast<const float*>(nullptr), noise.data()}) {
    std::vector<float> x = before;
    compute(FakeQuantizeGroups{x.data(), random, 1, static_cast<int64_t>(count), bits, symmetric}, Dtype::Float32);
    const double step = ((symmetric || count > 1 ? 2 : 0) + 1e-5) / (1 << bits);
    for (size_t i = 0; i < count; ++i) {
      // To nearest: half a step, a whole one beyond the last level. With noise: the next level above.
      const double moved = (x[i] - before[i]) / step;
      CHECK(moved >= -1.001 && moved <= (random ? 1.001 : 0.501), "level %d, %d bits: %zu moved by %g steps", where, bits, i, moved);
    }
  }
}

// A NaN and an infinity show in the params wherever in a vector they are, and give level 0.
void test_not_finite(AtLevel compute, int where, Levels as, size_t count) {
  const auto [bits, symmetric] = as;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    for (const size_t place : {size_t(0), count / 2, count - 1}) {
      std::vector<float> x = values(count, 5);
      x[place] = bad;
      Bytes levels(count * bits / 8);
      float params[2] = {};
      compute(QuantizeGroups{x.data(), levels.data(), params, 1, static_cast<int64_t>(count), as, {}}, Dtype::Float32);
      // One infinity alone has a range of NaN.
      CHECK(std::isnan(params[0]) || std::isinf(params[0]), "level %d: %g at %zu of %zu", where, bad, place, count);
      CHECK(level(levels, place, bits) == 0, "level %d: %g has level %d", where, bad, level(levels, place, bits));
    }
  }
}

// All pairs of 4-bit levels, there and back.
void test_nibbles() {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const uint32_t nibbles = byte | (255 - byte) << 8 | byte << 16 | 0x5au << 24;
    const uint64_t bytes = bytes_of_nibbles(nibbles);
    CHECK((bytes & 0xff) == byte >> 4 && (bytes >> 8 & 0xff) == (byte & 15), "byte %u", byte);
    CHECK(nibbles_of_bytes(bytes | 0xf0f0f0f0f0f0f0f0u) == nibbles, "byte %u", byte);
  }
}

void test_no_elements() {
  cpu::at_all_levels<QuantizeGroups>([](AtLevel compute) {
    float params[2] = {-1, -1};
    compute(QuantizeGroups{nullptr, nullptr, params, 1, 0, {8, false}, {}}, Dtype::Float32);
    CHECK(params[0] == 1 && params[1] == 0, "params %g %g", params[0], params[1]);
  });
}

}  // namespace

int main() {
  in_all_cases(test_quantize_and_back);
  in_all_cases(test_reduce);
  in_all_cases(test_dequantize_range);
  in_all_cases(test_fake_quantize);
  in_all_cases(test_not_finite);
  test_nibbles();
  test_no_elements();
  return report();
}
