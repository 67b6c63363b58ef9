// The quantizer's loops at every level against the formulas in double.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "levels.h"
#include "quantizer_loops.h"

namespace ds_kernels::cpu {
DS_KERNELS_CPU_LEVELS(QuantizerLoops, quantizer_loops)
}

using namespace ds_kernels;
using cpu::QuantizerLoops;

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
void at_all_levels(Test test) {
  int tested = 0;
  for (const auto& [level, table] : cpu::all_quantizer_loops()) {
    if (!table || !cpu::runs_here(level)) continue;
    ++tested;
    for (const int bits : {8, 4}) {
      for (const bool symmetric : {true, false}) {
        for (const size_t count : {2, 4, 6, 14, 16, 18, 30, 32, 34, 62, 64, 66, 1026}) {
          test(*table, static_cast<int>(level), bits, symmetric, count);
          if (bits == 8) test(*table, static_cast<int>(level), bits, symmetric, count - 1);
        }
      }
    }
  }
  CHECK(tested > 0, "no level was built that runs here");
}

void test_quantize_and_back(const QuantizerLoops& loops, int where, int bits, bool symmetric, size_t count) {
  const std::vector<float> x = values(count, 1);
  Bytes levels(count * bits / 8), back(count * 4);
  float params[2] = {};
  const auto n = static_cast<int64_t>(count);
  loops.quantize(Dtype::Float32, bits, symmetric)(x.data(), levels.data(), params, n);
  const double span = symmetric || count > 1 ? 2 : 0, offset = symmetric || count > 1 ? 0 : 1;
  const double scale = span == 0 ? 1 : (1 << bits) / span;
  CHECK(params[0] == 1 / scale && (symmetric || params[1] == offset), "level %d, %zu elements: params", where, count);
  for (size_t i = 0; i < count; ++i) {
    const int want = expected_level(x[i], scale, offset, bits);
    CHECK(level(levels, i, bits) == want, "level %d, %d bits, %zu elements: %zu is %d, expected %d", where, bits, count,
          i, level(levels, i, bits), want);
  }
  loops.dequantize(Dtype::Float32, bits, symmetric)(levels.data(), params, back.data(), n);
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, back.data() + 4 * i, 4);
    CHECK(value == level(levels, i, bits) / scale + offset, "level %d: value %zu", where, i);
  }
  CHECK(levels.guards_hold() && back.guards_hold(), "level %d, %d bits, %zu elements", where, bits, count);
}

// Three devices send groups that are not those of the sum.
void test_reduce(const QuantizerLoops& loops, int where, int bits, bool symmetric, size_t count) {
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
  const cpu::Received received{reinterpret_cast<const char*>(sent.data()), params.data(), devices, n, group};
  for (const int64_t groups : {1, 2}) {
    const int64_t size = n / groups;
    for (int64_t g = 0; g < groups; ++g) {
      float result[2] = {};
      loops.reduce(bits, symmetric)(received, g * size, (g + 1) * size, out.data() + g * size * bits / 8, result);
      for (int64_t i = g * size; i < (g + 1) * size; ++i) {
        const double value = level(out, static_cast<size_t>(i), bits) * double(result[0]) + (symmetric ? 0 : result[1]);
        const double error = std::abs(value - total[static_cast<size_t>(i)]);
        CHECK(error <= result[0] * 1.001, "level %d, %d bits: %lld is %g, expected %g", where, bits,
              static_cast<long long>(i), value, total[static_cast<size_t>(i)]);
      }
    }
  }
  CHECK(out.guards_hold(), "level %d, %d bits, %zu elements", where, bits, count);
}

void test_dequantize_range(const QuantizerLoops& loops, int where, int bits, bool, size_t count) {
  std::mt19937 random(3);
  Bytes levels(count * bits / 8), out(count * 4);
  for (size_t i = 0; i < count * bits / 8; ++i) levels.data()[i] = static_cast<unsigned char>(random());
  const float scale = 4, minimum = -1.5f;
  loops.dequantize_range(Dtype::Float32, bits)(levels.data(), &scale, &minimum, out.data(),
                                               static_cast<int64_t>(count));
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, out.data() + 4 * i, 4);
    const int want = bits == 8 ? levels[i] : level(levels, i, bits) & 15;
    CHECK(value == want / 4.0 - 1.5, "level %d, %d bits: %zu is %g", where, bits, i, value);
  }
  CHECK(out.guards_hold(), "level %d, %zu elements", where, count);
}

void test_fake_quantize(const QuantizerLoops& loops, int where, int bits, bool symmetric, size_t count) {
  const std::vector<float> before = values(count, 4), noise(count, 0.999f);
  for (const float* random : {static_cast<const float*>(nullptr), noise.data()}) {
    std::vector<float> x = before;
    loops.fake_quantize(Dtype::Float32, symmetric)(x.data(), random, static_cast<int64_t>(count), bits);
    const double step = ((symmetric || count > 1 ? 2 : 0) + 1e-5) / (1 << bits);
    for (size_t i = 0; i < count; ++i) {
      // To nearest: half a step, a whole one beyond the last level. With noise: the next level above.
      const double moved = (x[i] - before[i]) / step;
      CHECK(moved >= -1.001 && moved <= (random ? 1.001 : 0.501), "level %d, %d bits: %zu moved by %g steps", where, bits, i, moved);
    }
  }
}

// A NaN and an infinity show in the params wherever in a vector they are, and give level 0.
void test_not_finite(const QuantizerLoops& loops, int where, int bits, bool symmetric, size_t count) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    for (const size_t place : {size_t(0), count / 2, count - 1}) {
      std::vector<float> x = values(count, 5);
      x[place] = bad;
      Bytes levels(count * bits / 8);
      float params[2] = {};
      loops.quantize(Dtype::Float32, bits, symmetric)(x.data(), levels.data(), params, static_cast<int64_t>(count));
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
  for (const auto& [where, table] : cpu::all_quantizer_loops()) {
    if (!table || !cpu::runs_here(where)) continue;
    float params[2] = {-1, -1};
    table->quantize(Dtype::Float32, 8, false)(nullptr, nullptr, params, 0);
    CHECK(params[0] == 1 && params[1] == 0, "params %g %g", params[0], params[1]);
  }
}

}  // namespace

int main() {
  at_all_levels(test_quantize_and_back);
  at_all_levels(test_reduce);
  at_all_levels(test_dequantize_range);
  at_all_levels(test_fake_quantize);
  at_all_levels(test_not_finite);
  test_nibbles();
  test_no_elements();
  return report();
}
