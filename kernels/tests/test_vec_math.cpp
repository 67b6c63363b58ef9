// exp, erf and reductions of vec_math.h against double, at the level this file is compiled for.
#include <ds_kernels/vec_math.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "check.h"
#include "levels.h"

using namespace ds_kernels;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Function {
  const char* name;
  Floats (*vector)(Floats);
  float (*element)(float);
  double (*exact)(double);
  double bound;  // units in the last place
};

const Function kFunctions[] = {
    {"exponential", [](Floats x) { return exponential(x); }, [](float x) { return exponential(x); },
     [](double x) { return std::exp(x); }, 1.1},
    {"error_function", [](Floats x) { return error_function(x); }, [](float x) { return error_function(x); },
     [](double x) { return std::erf(x); }, 1.5},
};

float of_pattern(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The error of `actual` in units of the float format at `exact`; 0 where both are beyond its range.
double units(float actual, double exact) {
  if (std::isnan(exact) || std::isnan(actual)) return std::isnan(exact) == std::isnan(actual) ? 0 : HUGE_VAL;
  if (static_cast<float>(exact) == actual) return 0;  // infinities, and exactly rounded results
  if (std::isinf(exact)) return HUGE_VAL;
  const int binade = exact == 0 ? -126 : std::max(std::ilogb(exact), -126);
  return std::abs(actual - exact) / std::ldexp(1, binade - 23);
}

// Patterns all over the format: every exponent, either sign, NaN, infinity, subnormals.
void over_all_floats(const Function& function) {
  constexpr uint64_t kStride = 251;  // prime, so that low mantissa bits vary
  double worst = 0;
  float worst_at = 0;
  for (uint64_t first = 0; first < 1ull << 32; first += kStride * kLanes) {
    float x[kLanes], y[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) x[lane] = of_pattern(static_cast<uint32_t>(first + kStride * lane));
    store(y, function.vector(load(x)));
    for (int lane = 0; lane < kLanes; ++lane) {
      const double error = units(y[lane], function.exact(x[lane]));
      if (error > worst) worst = error, worst_at = x[lane];
    }
  }
  std::printf("%s: %.2f units at %a\n", function.name, worst, worst_at);
  CHECK(worst <= function.bound, "%s(%a) is %.2f units away", function.name, worst_at, worst);
}

void at_special_values(const Function& function) {
  const float values[] = {0.f,   -0.f,   1e-45f, -1e-45f, 1e-40f, kInfinity, -kInfinity, kNan, -kNan, 88.72f, 88.73f,
                          89.f,  -87.3f, -87.4f, -103.9f, -104.f, -105.f,    3.4e38f,    -3.4e38f, 0.92f, 3.92f, 9.01f,
                          1e-10f, 0.5f};
  for (const float x : values) {
    float all[kLanes];
    std::fill_n(all, kLanes, x);
    const float one = function.element(x), many = function.vector(load(all))[kLanes - 1];
    CHECK(units(one, function.exact(x)) <= function.bound, "%s(%a) is %a", function.name, x, one);
    CHECK(units(many, function.exact(x)) <= function.bound, "%s(%a) is %a", function.name, x, many);
    if (x == 0) CHECK(std::signbit(many) == std::signbit(function.exact(x)), "the sign of %s(%a)", function.name, x);
  }
}

void reductions() {
  Floats x;
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = static_cast<float>(lane + 1);
  CHECK(sum_of(x) == kLanes * (kLanes + 1) / 2, "%a", sum_of(x));
  Floats vectors[kLanes];
  for (int k = 0; k < kLanes; ++k) vectors[k] = x + static_cast<float>(k * k);
  const Floats sums = sums_of(vectors);
  for (int k = 0; k < kLanes; ++k) {
    CHECK(sums[k] == kLanes * (kLanes + 1) / 2 + kLanes * k * k, "vector %d: %a", k, sums[k]);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    Floats peak = Floats{} - kInfinity;
    peak[lane] = -3.f;
    CHECK(maximum_of(peak) == -3.f, "lane %d", lane);
    Floats poisoned = x;
    poisoned[lane] = kNan;
    CHECK(std::isnan(sum_of(poisoned)), "lane %d", lane);
    const float top = maximum_of(poisoned);  // whether a NaN wins is not said, but nothing else is made up
    CHECK(std::isnan(top) || (top >= 1 && top <= kLanes), "lane %d: %a", lane, top);
  }
  CHECK(maximum(1.f, 2.f) == 2 && minimum(1.f, 2.f) == 1 && std::isnan(maximum(1.f, kNan)), "of one element");
  CHECK(polynomial(2.f, 1.f, 3.f, 5.f) == 27, "1 + 3 x + 5 x^2 at 2");
}

}  // namespace

int main() {
  if (!cpu::runs_here(cpu::Level::DS_KERNELS_CPU_LEVEL)) return 77;  // skipped
  for (const Function& function : kFunctions) {
    over_all_floats(function);
    at_special_values(function);
  }
  reductions();
  return report();
}
