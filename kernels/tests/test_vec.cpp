// Conversions and lane-wise functions of vec.h, at the level this file is compiled for.
#include <ds_kernels/vec.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "levels.h"

using namespace ds_kernels;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A 16-bit format by its definition: bits of the mantissa and of the exponent.
template <class Element>
struct Format;
template <>
struct Format<BFloat16> {
  static constexpr int mantissa = 7, exponent = 8;
};
template <>
struct Format<Float16> {
  static constexpr int mantissa = 10, exponent = 5;
};

// The value of a finite pattern, by the definition of the format.
template <class Element>
double value_of(uint16_t bits) {
  constexpr int mantissa = Format<Element>::mantissa, bias = (1 << (Format<Element>::exponent - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> mantissa;
  const int fraction = bits & ((1 << mantissa) - 1);
  const double magnitude = exponent ? std::ldexp(1 + std::ldexp(fraction, -mantissa), exponent - bias)
                                    : std::ldexp(fraction, 1 - bias - mantissa);
  return bits & 0x8000 ? -magnitude : magnitude;
}

template <class Element>
constexpr uint16_t kInfinityBits = ((1 << Format<Element>::exponent) - 1) << Format<Element>::mantissa;

template <class Element>
bool is_nan(uint16_t bits) {
  return (bits & 0x7fff) > kInfinityBits<Element>;
}

// x rounded to nearest even, by the definition of the format: to a multiple of the unit of its binade.
template <class Element>
double rounded(double x) {
  constexpr int mantissa = Format<Element>::mantissa, bias = (1 << (Format<Element>::exponent - 1)) - 1;
  if (x == 0 || std::isinf(x)) return x;
  const int binade = std::max(std::ilogb(x), 1 - bias);
  const double result = std::ldexp(std::nearbyint(std::ldexp(x, mantissa - binade)), binade - mantissa);
  return std::abs(result) >= std::ldexp(1, bias + 1) ? std::copysign(HUGE_VAL, x) : result;
}

template <class Element>
void narrow_all(const std::vector<float>& values) {
  for (size_t i = 0; i + kLanes <= values.size(); i += kLanes) {
    Element stored[kLanes];
    store(stored, load(values.data() + i));
    for (int lane = 0; lane < kLanes; ++lane) {
      const float x = values[i + lane];
      const uint16_t bits = stored[lane].bits;
      if (std::isnan(x)) {
        CHECK(is_nan<Element>(bits), "a NaN became %04x", bits);
        CHECK(std::signbit(x) == bool(bits & 0x8000), "a NaN changed sign");
        continue;
      }
      const double expected = rounded<Element>(x);
      if (std::isinf(expected)) {
        CHECK((bits & 0x7fff) == kInfinityBits<Element>, "%a became %04x", x, bits);
      } else {
        CHECK(!is_nan<Element>(bits) && value_of<Element>(bits) == expected, "%a became %04x", x, bits);
      }
      CHECK(std::signbit(x) == bool(bits & 0x8000), "%a changed sign", x);
    }
  }
}

// Every pattern is read as the format defines it, and survives a round trip.
template <class Element>
void widen_all() {
  for (uint32_t first = 0; first < 0x10000; first += kLanes) {
    Element stored[kLanes], again[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) stored[lane].bits = static_cast<uint16_t>(first + lane);
    const Floats wide = load(stored);
    store(again, wide);
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint16_t bits = stored[lane].bits;
      if (is_nan<Element>(bits)) {
        CHECK(std::isnan(wide[lane]) && is_nan<Element>(again[lane].bits), "NaN %04x is lost", bits);
      } else if ((bits & 0x7fff) == kInfinityBits<Element>) {
        CHECK(std::isinf(wide[lane]) && again[lane].bits == bits, "infinity %04x is lost", bits);
      } else {
        CHECK(wide[lane] == value_of<Element>(bits), "%04x was read as %a", bits, wide[lane]);
        CHECK(again[lane].bits == bits, "%04x came back as %04x", bits, again[lane].bits);
      }
    }
  }
}

// Values at, beside and between those of a format, and random patterns.
template <class Element>
std::vector<float> hard_values() {
  std::vector<float> values = {0.f,      -0.f,  kInfinity, -kInfinity, kNan,     -kNan,   1e-45f, -1e-45f,
                               65504.f,  65519.996f, 65520.f,   -65520.f,   3.4e38f,  -3.4e38f, 6e-8f,  2.98e-8f,
                               2.981e-8f, 6.1e-5f, 6.09e-5f, 5.96e-8f,  1.1754944e-38f, 1e-40f};
  for (uint32_t bits = 0; bits < 0x7fff; ++bits) {
    if (bits >= kInfinityBits<Element>) break;
    const double low = value_of<Element>(static_cast<uint16_t>(bits));
    const double high = bits + 1 == kInfinityBits<Element> ? 2 * low - value_of<Element>(static_cast<uint16_t>(bits - 1))
                                                           : value_of<Element>(static_cast<uint16_t>(bits + 1));
    const float middle = static_cast<float>((low + high) / 2);
    for (const float x : {middle, std::nextafter(middle, 0.f), std::nextafter(middle, kInfinity)}) {
      values.push_back(x);
      values.push_back(-x);
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 1 << 18; ++i) {
    const uint32_t bits = random();
    float x;
    std::memcpy(&x, &bits, sizeof x);
    values.push_back(x);
  }
  values.resize(values.size() / kLanes * kLanes + kLanes, 1.f);
  return values;
}

void functions_follow_those_of_one_element() {
  const std::vector<float> values = hard_values<BFloat16>();
  for (size_t i = 0; i + kLanes <= values.size(); i += kLanes) {
    const Floats x = load(values.data() + i);
    const Floats roots = square_root(x), finite = zero_unless_finite(x), positive = zero_if_negative(x), signs = sign(x);
    for (int lane = 0; lane < kLanes; ++lane) {
      const float one = x[lane];
      const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
      CHECK(same(roots[lane], std::sqrt(one)), "square root of %a is %a", one, roots[lane]);
      CHECK(same(finite[lane], std::isfinite(one) ? one : 0.f), "%a became %a", one, finite[lane]);
      CHECK(same(positive[lane], one < 0 ? 0.f : one), "%a became %a", one, positive[lane]);
      CHECK(same(signs[lane], sign(one)), "sign of %a is %a", one, signs[lane]);
      CHECK(same(zero_unless_finite(one), finite[lane]) && same(zero_if_negative(one), positive[lane]), "of %a", one);
    }
  }
  CHECK(sign(3.f) == 1 && sign(-1e-45f) == -1 && sign(0.f) == 0 && std::isnan(sign(kNan)), "sign");
}

// Nothing beyond the count is read or written, which a sanitizer sees at the end of an allocation.
template <class Element>
void parts_stay_within_their_count() {
  for (int64_t count = 1; count < kLanes; ++count) {
    std::vector<Element> from(count), to(count);
    std::memset(from.data(), 0x3c, count * sizeof(Element));
    const Floats x = PartVector{count}.load(from.data());
    PartVector{count}.store(to.data(), x);
    CHECK(std::memcmp(from.data(), to.data(), count * sizeof(Element)) == 0, "%d elements", int(count));
    for (int64_t lane = count; lane < kLanes; ++lane) CHECK(x[lane] == 0, "lane %d", int(lane));
  }
}

void every_position_is_visited_once() {
  for (int64_t count = 0; count < 5 * kLanes; ++count) {
    std::vector<float> visits(count, 0.f);
    float* data = visits.data();
    for_each_vector(count, [=](int64_t i, auto memory) { memory.store(data + i, memory.load(data + i) + 1.f); });
    for (const float visit : visits) CHECK(visit == 1, "of %d elements", int(count));
  }
}

}  // namespace

int main() {
  if (!cpu::runs_here(cpu::Level::DS_KERNELS_CPU_LEVEL)) return 77;  // skipped
  widen_all<BFloat16>();
  widen_all<Float16>();
  narrow_all<BFloat16>(hard_values<BFloat16>());
  narrow_all<Float16>(hard_values<Float16>());
  functions_follow_those_of_one_element();
  parts_stay_within_their_count<float>();
  parts_stay_within_their_count<BFloat16>();
  parts_stay_within_their_count<Float16>();
  every_position_is_visited_once();
  return report();
}
