// The quantizer's loops at every level against the formulas in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <ds_kernels/quantizer.h>

#include "at_levels.h"
#include "elements.h"

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

constexpr Dtype kDtypes[] = {Dtype::Float32, Dtype::BFloat16, Dtype::Float16};
constexpr int kGroups = 3;

// Three groups of multiples of 1/256 within [-1, 1], both ends among them; of the second within [-2, 2], of the third
// within [-0.5, 0.5]: levels without rounding errors, ties included.
Elements values(Dtype dtype, size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Elements result(dtype, kGroups * count, 1);
  for (int group = 0; group < kGroups; ++group) {
    const float size = group == 0 ? 1.f : group == 1 ? 2.f : 0.5f;
    for (size_t i = 0; i < count; ++i) {
      const float x = i == 0           ? 1.f
                      : i == count - 1 ? -1.f
                                       : static_cast<float>(static_cast<int>(random() % 513) - 256) / 256;
      result.set(group * count + i, size * x);
    }
  }
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
  const auto n = static_cast<int64_t>(count);
  for (const Dtype dtype : kDtypes) {
    Elements x = values(dtype, count, 1), back(dtype, kGroups * count, 1);
    Bytes levels(kGroups * count * bits / 8);
    const int columns = symmetric ? 1 : 2;
    std::vector<float> params(kGroups * columns);
    compute(QuantizeGroups{x.data(), levels.data(), params.data(), kGroups, n, as, {}}, dtype);
    compute(DequantizeGroups{levels.data(), params.data(), back.data(), kGroups, n, as}, dtype);
    for (int group = 0; group < kGroups; ++group) {
      const double largest = std::abs(x[group * count]), span = symmetric || count > 1 ? 2 * largest : 0;
      const double offset = symmetric || count > 1 ? 0 : largest, scale = span == 0 ? 1 : (1 << bits) / span;
      const float* p = &params[group * columns];
      CHECK(p[0] == 1 / scale && (symmetric || p[1] == offset), "level %d, %zu elements: params", where, count);
      for (size_t i = group * count; i < (group + 1) * count; ++i) {
        const int got = level(levels, i, bits), want = expected_level(x[i], scale, offset, bits);
        CHECK(got == want, "level %d, %d bits, %zu elements: %zu is %d, expected %d", where, bits, count, i, got, want);
        CHECK(back[i] == got / scale + offset, "level %d, dtype %d: value %zu is %g", where, int(dtype), i, back[i]);
      }
    }
    CHECK(levels.guards_hold() && back.guards_hold(), "level %d, %d bits, %zu elements", where, bits, count);
  }
}

// Runs of two groups, of 2 slices, 3 nodes and 2 devices each, from [node, device, slice] to [slice, device, node].
void test_swizzle(AtLevel compute, int where, Levels as, size_t count) {
  constexpr int kSlices = 2, kNodes = 3, kDevices = 2, kRun = 2, kAll = kSlices * kNodes * kDevices * kRun;
  if (count > 34) return;
  const auto [bits, symmetric] = as;
  const auto n = static_cast<int64_t>(count);
  Elements x(Dtype::Float32, kAll * count);
  std::mt19937 random(8);
  for (size_t i = 0; i < x.count(); ++i) x.set(i, static_cast<float>(static_cast<int>(random() % 129) - 64) / 64);
  const int columns = symmetric ? 1 : 2;
  Bytes plain(kAll * count * bits / 8), moved(kAll * count * bits / 8);
  std::vector<float> params(kAll * columns), moved_params(kAll * columns);
  compute(QuantizeGroups{x.data(), plain.data(), params.data(), kAll, n, as, {}}, Dtype::Float32);
  const Swizzle swizzle{kSlices, kNodes, kDevices, kRun};
  compute(QuantizeGroups{x.data(), moved.data(), moved_params.data(), kAll, n, as, swizzle}, Dtype::Float32);
  int from = 0;
  for (int node = 0; node < kNodes; ++node) {
    for (int device = 0; device < kDevices; ++device) {
      for (int slice = 0; slice < kSlices; ++slice) {
        for (int each = 0; each < kRun; ++each, ++from) {
          const int to = ((slice * kDevices + device) * kNodes + node) * kRun + each;
          for (int i = 0; i < columns; ++i) {
            CHECK(moved_params[to * columns + i] == params[from * columns + i], "level %d: params of group %d", where, from);
          }
          for (size_t i = 0; i < count; ++i) {
            CHECK(level(moved, to * count + i, bits) == level(plain, from * count + i, bits), "level %d: group %d", where,
                  from);
          }
        }
      }
    }
  }
  CHECK(moved.guards_hold(), "level %d, %d bits, %zu elements", where, bits, count);
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
      // Half a step; a whole one beyond the last level.
      const bool last = level(out, static_cast<size_t>(i), bits) == (1 << (bits - 1)) - 1;
      CHECK(error <= result[0] * (last ? 1.001 : 0.501), "level %d, %d bits: %lld is %g, expected %g", where, bits,
            static_cast<long long>(i), value, total[static_cast<size_t>(i)]);
    }
  }
  CHECK(out.guards_hold(), "level %d, %d bits, %zu elements", where, bits, count);
}

void test_dequantize_range(AtLevel compute, int where, Levels as, size_t count) {
  const int bits = as.bits;
  if (as.symmetric) return;  // as which these levels never are
  for (const Dtype dtype : kDtypes) {
    std::mt19937 random(3);
    Bytes levels(kGroups * count * bits / 8);
    Elements out(dtype, kGroups * count, 1), scale(dtype, kGroups), minimum(dtype, kGroups);
    for (size_t i = 0; i < kGroups * count * bits / 8; ++i) levels.data()[i] = static_cast<unsigned char>(random());
    for (int group = 0; group < kGroups; ++group) {
      scale.set(group, group == 1 ? 8.f : 4.f), minimum.set(group, static_cast<float>(group) - 1.5f);
    }
    compute(DequantizeRangeGroups{levels.data(), scale.data(), minimum.data(), out.data(), kGroups,
                                  static_cast<int64_t>(count), bits},
            dtype);
    for (size_t i = 0; i < kGroups * count; ++i) {
      const int have = bits == 8 ? levels[i] : level(levels, i, bits) & 15;
      const double want = have / scale[i / count] + minimum[i / count];
      CHECK(std::abs(out[i] - want) <= (dtype == Dtype::Float32 ? 0 : 0.5 * out.unit(want)), "level %d, %d bits: %zu is %g, "
            "expected %g", where, bits, i, out[i], want);
    }
    CHECK(out.guards_hold(), "level %d, %zu elements", where, count);
  }
}

void test_fake_quantize(AtLevel compute, int where, Levels as, size_t count) {
  const auto [bits, symmetric] = as;
  std::vector<float> noise(kGroups * count, 0.9f);
  for (const Dtype dtype : kDtypes) {
    for (const float* random : {static_cast<const float*>(nullptr), static_cast<const float*>(noise.data())}) {
      Elements x = values(dtype, count, 4);
      const Elements before = x;
      compute(FakeQuantizeGroups{x.data(), random, kGroups, static_cast<int64_t>(count), bits, symmetric}, dtype);
      for (size_t i = 0; i < kGroups * count; ++i) {
        const double largest = std::abs(before[i / count * count]), top = (1 << (bits - 1)) - 1;
        const double low = symmetric ? 0 : count > 1 ? -largest : largest;
        const double step = ((symmetric || count > 1 ? 2 * largest : 0) + 1e-5) / (1 << bits);
        const double exact = (before[i] - low) / step;
        double level = random ? std::floor(exact + 0.9) : half_even(exact);
        if (symmetric) level = std::fmin(std::fmax(level, -top - 1), top);
        const double want = level * step + low, allowed = dtype == Dtype::Float32 ? 2e-6 : 0.5 * x.unit(want) + 2e-6;
        CHECK(std::abs(x[i] - want) <= allowed, "level %d, dtype %d, %d bits: %zu is %.9g, expected %.9g", where,
              int(dtype), bits, i, x[i], want);
      }
      CHECK(x.guards_hold(), "level %d, %zu elements", where, count);
    }
  }
}

// A NaN and an infinity show in the params wherever in a vector they are, and give level 0.
void test_not_finite(AtLevel compute, int where, Levels as, size_t count) {
  const auto [bits, symmetric] = as;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    for (const size_t place : {size_t(0), count / 2, count - 1}) {
      Elements x = values(Dtype::Float32, count, 5);
      x.set(place, bad);
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
  in_all_cases(test_swizzle);
  in_all_cases(test_reduce);
  in_all_cases(test_dequantize_range);
  in_all_cases(test_fake_quantize);
  in_all_cases(test_not_finite);
  test_nibbles();
  test_no_elements();
  return report();
}
