// LAMB's loops, every dtype and level, against the formula in double; its norms over a thousand million elements.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "at_levels.h"
#include "elements.h"
#include "lamb_loops.h"

using namespace ds_kernels;
using cpu::LambCopy;
using cpu::LambLoops;

namespace {

struct Element {
  double p, g, m, v;
};

std::vector<Element> elements(size_t count) {
  std::mt19937 random(7);
  const auto power = [&](int low, int high) { return std::ldexp(1, low + int(random() % unsigned(high - low + 1))); };
  std::vector<Element> result(count);
  for (Element& e : result) {
    const double sign = random() % 2 ? 1 : -1;
    e = {sign * power(-1, 1), power(-1, 1), power(-2, -1), power(-2, 0)};
  }
  return result;
}

double update_of(const Element& e, const LambOptions& o, int step) {
  const double c1 = o.bias_correction ? 1 - std::pow(o.beta1, step) : 1;
  const double c2 = o.bias_correction ? 1 - std::pow(o.beta2, step) : 1;
  const double m = o.correct_inside ? e.m / c1 : e.m, v = o.correct_inside ? e.v / c2 : e.v;
  return m / (o.eps_inside_sqrt ? std::sqrt(v + o.eps) : std::sqrt(v) + o.eps) + o.weight_decay * e.p;
}

double step_size_of(const LambOptions& o, int step) {
  const double c1 = o.bias_correction ? 1 - std::pow(o.beta1, step) : 1;
  const double c2 = o.bias_correction ? 1 - std::pow(o.beta2, step) : 1;
  return o.correct_inside ? o.lr : o.lr * std::sqrt(c2) / c1;
}

struct Types {
  Dtype param, grad, state, copy;
};

void compare(const LambLoops& loops, int level, const Types& types, size_t count, const LambOptions& options) {
  const int number = 3;
  const LambStep step = lamb_step(options, number);
  std::vector<Element> all = elements(count);
  Elements p(types.param, count), g(types.grad, count), m(types.state, count), v(types.state, count),
      c(types.copy, count);
  for (size_t i = 0; i < count; ++i) {  // powers of two, so that moments have few bits and are exact in every dtype
    p.set(i, static_cast<float>(all[i].p)), g.set(i, static_cast<float>(all[i].g));
    m.set(i, static_cast<float>(all[i].m)), v.set(i, static_cast<float>(all[i].v));
  }
  std::vector<LambSums> sums(count / Slices::kUnit + 1);
  const bool float_states = types.state == Dtype::Float32;
  const auto first = loops.moments(types.param, types.grad, float_states);
  CHECK(first, "level %d has no loop for dtypes %d, %d", level, int(types.param), int(types.grad));
  if (!first) return;
  first(p.data(), g.data(), m.data(), v.data(), count, step, sums.data());

  double p_squares = 0, u_squares = 0;
  for (Element& e : all) {
    const double g64 = e.g / options.grad_scale;
    e.m = options.beta1 * e.m + (1 - options.beta1) * g64;
    e.v = options.beta2 * e.v + (1 - options.beta2) * g64 * g64;
    const double u = update_of(e, options, number);
    p_squares += e.p * e.p, u_squares += u * u;
  }
  const LambSums total = lamb_total(sums.data(), (count + Slices::kUnit - 1) / Slices::kUnit);
  CHECK(total.param == p_squares, "level %d, %zu elements: %a, not %a", level, count, total.param, p_squares);
  CHECK(std::abs(total.update - u_squares) <= 1e-6 * u_squares, "level %d, %zu elements: %a, not %a", level, count,
        total.update, u_squares);

  const double ratio = lamb_ratio(total, step), size = step_size_of(options, number);
  loops.params(types.param, float_states)(p.data(), m.data(), v.data(), {c.data(), types.copy}, count, step,
                                          static_cast<float>(size * ratio));
  for (size_t i = 0; i < count; ++i) {
    const double want = all[i].p - size * ratio * update_of(all[i], options, number);
    const double scale = std::max(std::abs(want), std::abs(all[i].p)) + 1e-3;
    CHECK(m[i] == all[i].m && v[i] == all[i].v, "level %d: moments %zu", level, i);
    CHECK(std::abs(p[i] - want) <= 0.5 * p.unit(want) + 1e-6 * scale, "level %d: p[%zu] is %a, not %a", level, i, p[i], want);
    CHECK(std::abs(c[i] - want) <= 0.5 * c.unit(want) + 1e-6 * scale, "level %d: copy[%zu] is %a, not %a", level, i, c[i], want);
  }
}

void test_formula(const LambLoops& loops, int level) {
  const LambOptions deepspeed{0.125, 0.5, 0.5, 1e-8, 0.125, 0.01, 10, 1, false, true, false};
  LambOptions inside = deepspeed, plain = deepspeed, scaled = deepspeed;
  inside.eps_inside_sqrt = true, inside.eps = 1e-3, inside.correct_inside = true;
  plain.weight_decay = 0, plain.bias_correction = false;
  scaled.grad_scale = 2;
  for (const LambOptions& options : {deepspeed, inside, plain, scaled}) {
    for (const Dtype param : {Dtype::Float32, Dtype::BFloat16, Dtype::Float16}) {
      for (const Dtype grad : {Dtype::Float32, Dtype::BFloat16, Dtype::Float16}) {
        if (param != Dtype::Float32 && grad != param && grad != Dtype::Float32) continue;
        for (const Dtype state : {param, Dtype::Float32}) {
          for (const size_t count : {0, 1, 3, 7, 8, 15, 16, 17, 63, 65, 1023, 1024, 1025, 3000}) {
            compare(loops, level, {param, grad, state, grad}, count, options);
          }
        }
      }
    }
  }
}

void test_unsupported(const LambLoops& loops) {
  CHECK(!loops.moments(Dtype::BFloat16, Dtype::Float16, true), "bfloat16 parameters took float16 gradients");
  CHECK(!loops.moments(Dtype::Float16, Dtype::BFloat16, false), "float16 parameters took bfloat16 gradients");
}

// A NaN in one gradient reaches its own moments, the update's norm, and no other sum.
void test_nan(const LambLoops& loops) {
  const LambStep step = lamb_step({0.1, 0.9, 0.999, 1e-8, 0, 0.01, 10, 1, false, true, false}, 1);
  std::vector<float> p(2000, 1.f), g(2000, 1.f), m(2000, 0.f), v(2000, 0.f);
  g[1999] = std::numeric_limits<float>::quiet_NaN();
  LambSums sums[2];
  loops.moments(Dtype::Float32, Dtype::Float32, true)(p.data(), g.data(), m.data(), v.data(), 2000, step, sums);
  CHECK(!std::isnan(sums[0].update) && std::isnan(sums[1].update), "sums of the update");
  CHECK(sums[0].param == 1024 && sums[1].param == 976, "sums of the parameters");
  CHECK(std::isnan(lamb_ratio(lamb_total(sums, 2), step)), "a NaN was clamped away");
  CHECK(std::isnan(m[1999]) && !std::isnan(m[1998]), "moments");
}

// Lanes beyond the end of an array are no part of its norm, even where they divide zero by zero.
void test_no_eps(const LambLoops& loops) {
  const LambStep step = lamb_step({0.1, 0.5, 0.5, 0, 0, 0.01, 10, 1, false, false, false}, 1);
  float p = 1, g = 2, m = 0, v = 0;
  LambSums sums;
  loops.moments(Dtype::Float32, Dtype::Float32, true)(&p, &g, &m, &v, 1, step, &sums);
  CHECK(std::abs(sums.update - 0.5) < 1e-6, "%g", sums.update);
}

void test_ratio() {
  LambStep step = lamb_step({0.1, 0.9, 0.999, 1e-8, 0, 0.5, 2, 1, false, true, false}, 1);
  CHECK(lamb_ratio({0, 4}, step) == 1 && lamb_ratio({4, 0}, step) == 1, "norms of zero");
  CHECK(lamb_ratio({9, 1}, step) == 2 && lamb_ratio({1, 9}, step) == 0.5 && lamb_ratio({4, 4}, step) == 1, "limits");
}

// The bound that lamb.h states: 1e9 elements, as many parts as they have, each the sum of a unit computed for real.
void test_a_thousand_million(const LambLoops& loops) {
  const LambStep step = lamb_step({0.1, 0.9, 0.999, 1e-8, 0.01, 0.01, 10, 1, false, true, false}, 1);
  std::mt19937 random(3);
  std::vector<float> p(Slices::kUnit), g(Slices::kUnit, 1.f), m(Slices::kUnit, 0.f), v(Slices::kUnit, 0.f);
  for (float& x : p) x = 0.02f + 0.01f * float(random() % 1000) / 1000;
  long double exact = 0;
  for (const float x : p) exact += static_cast<long double>(x) * x;
  LambSums unit;
  loops.moments(Dtype::Float32, Dtype::Float32, true)(p.data(), g.data(), m.data(), v.data(), Slices::kUnit, step,
                                                     &unit);
  const int64_t units = 1000000000 / Slices::kUnit;
  const std::vector<LambSums> parts(units, unit);
  const double error = std::abs(static_cast<double>(lamb_total(parts.data(), units).param / (exact * units) - 1));
  CHECK(error < 1.1e-10, "relative error %g", error);
}

}  // namespace

int main() {
  cpu::at_all_levels_of<LambLoops>([](const LambLoops& loops, int level) {
    test_formula(loops, level);
    test_unsupported(loops);
    test_nan(loops);
    test_no_eps(loops);
    test_a_thousand_million(loops);
  });
  test_ratio();
  return report();
}
