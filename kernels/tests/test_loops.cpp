// The loops of every family, dtype and level against the formulas in double.
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include <ds_kernels/adagrad.h>
#include <ds_kernels/adam.h>
#include <ds_kernels/lion.h>

#include "at_levels.h"
#include "elements.h"

using namespace ds_kernels;

namespace {

// Multiples of 1/64 of either sign with magnitude in [0.5, 1.5]: exact in every dtype, and no sum of them cancels.
std::vector<float> values(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> result(count);
  for (float& x : result) x = (random() % 2 ? 1.f : -1.f) * float(32 + random() % 65) / 64.f;
  return result;
}

struct Element {
  double p, g, m, v;  // Adagrad keeps its sum in v, Lion its moment in m
};
using Formula = std::function<Element(Element)>;
using Run = std::function<void(Elements& p, Elements& g, Elements& m, Elements& v, int64_t count)>;

// Runs a loop on arrays of `count` elements and compares each with the formula.
void compare(const char* what, int level, Dtype param, Dtype grad, Dtype state, size_t count, const Run& run,
             const Formula& formula) {
  Elements p(param, count, 1), g(grad, count, 1), m(state, count, 1), v(state, count, 1);
  const std::vector<float> ps = values(count, 1), gs = values(count, 2), ms = values(count, 3), vs = values(count, 4);
  std::vector<Element> expected;
  for (size_t i = 0; i < count; ++i) {
    p.set(i, ps[i]), g.set(i, gs[i]), m.set(i, ms[i] / 2), v.set(i, std::abs(vs[i]) / 2);
    expected.push_back(formula({ps[i], gs[i], ms[i] / 2, std::abs(vs[i]) / 2}));
  }
  run(p, g, m, v, static_cast<int64_t>(count));
  for (size_t i = 0; i < count; ++i) {
    const auto close = [&](const Elements& actual, double want, double was, const char* name) {
      const double units = std::abs(actual[i] - want) / actual.unit(std::max(std::abs(want), std::abs(was)));
      CHECK(units <= (actual.size() == 4 ? 3 : 0.51), "%s, level %d, %zu elements: %s[%zu] is %a, expected %a", what,
            level, count, name, i, actual[i], want);
    };
    close(p, expected[i].p, ps[i], "p");
    close(m, expected[i].m, ms[i] / 2, "m");
    close(v, expected[i].v, vs[i] / 2, "v");
    CHECK(g[i] == gs[i], "%s, level %d: gradient %zu was modified", what, level, i);
  }
  CHECK(p.guards_hold() && g.guards_hold() && m.guards_hold() && v.guards_hold(), "%s, level %d, %zu elements", what,
        level, count);
}

// All dtypes, and sizes around those of vectors, at all levels that run here.
template <class Work, class Test>
void in_all_cases(Test test) {
  cpu::at_all_levels<Work>([&](cpu::AtLevel compute) {
    for (const Dtype param : {Dtype::Float32, Dtype::BFloat16, Dtype::Float16}) {
      for (const Dtype grad : {param, Dtype::Float32}) {
        for (const Dtype state : {param, Dtype::Float32}) {
          for (size_t count : {0, 1, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 1027}) {
            test(compute, param, grad, state, count);
          }
        }
      }
    }
  });
}

// One tensor in each list.
struct Lists {
  std::vector<void*> data;
  std::vector<Dtype> dtypes;
  int64_t numel;

  TensorLists tensors() const { return {data.size(), 1, &numel, data.data(), dtypes.data()}; }
};

Element adam(Element e, const AdamOptions& o, int step) {
  const double c1 = o.bias_correction ? 1 - std::pow(o.beta1, step) : 1;
  const double c2 = o.bias_correction ? 1 - std::pow(o.beta2, step) : 1;
  const double g = o.adamw ? e.g : e.g + o.weight_decay * e.p;
  const double m = o.beta1 * e.m + (1 - o.beta1) * g, v = o.beta2 * e.v + (1 - o.beta2) * g * g;
  const double decayed = o.adamw ? e.p - o.lr * o.weight_decay * e.p : e.p;
  return {decayed - o.lr * (m / c1) / (std::sqrt(v / c2) + o.eps), e.g, m, v};
}

void test_adam() {
  in_all_cases<AdamLists>([](cpu::AtLevel compute, Dtype param, Dtype grad, Dtype state, size_t count) {
    for (const double decay : {0.0, 0.1}) {
      for (const bool adamw : {true, false}) {
        for (const bool correction : {true, false}) {
          const AdamOptions options{1e-2, 0.9, 0.999, 1e-8, decay, adamw, correction};
          const AdamStep step = adam_step(options, 3);
          compare(
              "adam", static_cast<int>(compute.level), param, grad, state, count,
              [&](Elements& p, Elements& g, Elements& m, Elements& v, int64_t n) {
                const Lists lists{{p.data(), g.data(), m.data(), v.data()}, {param, grad, state, state}, n};
                compute(AdamLists{lists.tensors(), {&step, false}, false}, param);
              },
              [&](Element e) { return adam(e, options, 3); });
        }
      }
    }
  });
}

void test_adam_rollback() {
  const AdamOptions options{1e-2, 0.9, 0.999, 1e-8, 0.1, true, true};
  const AdamStep step = adam_step(options, 3);
  in_all_cases<AdamLists>([&](cpu::AtLevel compute, Dtype param, Dtype grad, Dtype state, size_t count) {
    if (param != Dtype::Float32) return;
    compare(
        "rollback", static_cast<int>(compute.level), param, grad, state, count,
        [&](Elements& p, Elements& g, Elements& m, Elements& v, int64_t n) {
          const Lists lists{{p.data(), g.data(), m.data(), v.data()}, {param, grad, state, state}, n};
          compute(AdamLists{lists.tensors(), {&step, false}, true}, param);
        },
        [&](Element e) {
          const double c1 = 1 - std::pow(0.9, 3), c2 = 1 - std::pow(0.999, 3);
          const double p = (e.p + 1e-2 * (e.m / c1) / (std::sqrt(e.v / c2) + 1e-8)) / (1 - 1e-3);
          return Element{p, e.g, (e.m - 0.1 * e.g) / 0.9, std::max((e.v - 0.001 * e.g * e.g) / 0.999, 0.0)};
        });
  });
}

void test_adagrad() {
  in_all_cases<AdagradLists>([](cpu::AtLevel compute, Dtype param, Dtype grad, Dtype state, size_t count) {
    for (const double decay : {0.0, 0.1}) {
      const AdagradStep step{1e-2f, 1e-10f, float(decay)};
      compare(
          "adagrad", static_cast<int>(compute.level), param, grad, state, count,
          [&](Elements& p, Elements& g, Elements&, Elements& v, int64_t n) {
            const Lists lists{{p.data(), g.data(), v.data()}, {param, grad, state}, n};
            compute(AdagradLists{lists.tensors(), step}, param);
          },
          [&](Element e) {
            const double g = e.g + decay * e.p, v = e.v + g * g;
            return Element{e.p - 1e-2 * g / (std::sqrt(v) + 1e-10), e.g, e.m, v};
          });
    }
  });
}

void test_lion() {
  in_all_cases<LionLists>([](cpu::AtLevel compute, Dtype param, Dtype grad, Dtype state, size_t count) {
    for (const double decay : {0.0, 0.1}) {
      const LionStep step = lion_step(1e-2, 0.9, 0.99, decay);
      compare(
          "lion", static_cast<int>(compute.level), param, grad, state, count,
          [&](Elements& p, Elements& g, Elements& m, Elements&, int64_t n) {
            const Lists lists{{p.data(), g.data(), m.data()}, {param, grad, state}, n};
            compute(LionLists{lists.tensors(), step}, param);
          },
          [&](Element e) {
            const double c = 0.9 * e.m + 0.1 * e.g;
            return Element{e.p - 1e-2 * decay * e.p - (c > 0 ? 1e-2 : -1e-2), e.g, 0.99 * e.m + 0.01 * e.g, e.v};
          });
    }
  });
}

// The maths of one element, as a GPU's thread runs it, agrees with the vectors'.
void test_one_element() {
  const AdamStep step = adam_step({1e-2, 0.9, 0.999, 1e-8, 0.1, true, true}, 3);
  float p = 1.5f, m = 0.25f, v = 0.5f;
  adam_update(p, -0.75f, m, v, step);
  const Element expected = adam({1.5, -0.75, 0.25, 0.5}, {1e-2, 0.9, 0.999, 1e-8, 0.1, true, true}, 3);
  CHECK(std::abs(p - expected.p) < 2e-7 && std::abs(m - expected.m) < 1e-7 && std::abs(v - expected.v) < 1e-7, "adam");
  float moment = 0.f, param = 2.f;
  lion_update(param, 0.f, moment, lion_step(1e-2, 0.9, 0.99, 0));
  CHECK(param == 2.f, "the sign of 0 moved a parameter");
  float sum = 0.f;
  param = 2.f;
  adagrad_update(param, 2.f, sum, AdagradStep{0.5f, 0.f, 0.f});
  CHECK(param == 1.5f && sum == 4.f, "adagrad");
}

// Several tensors with steps of their own.
void test_steps_of_tensors() {
  cpu::at_all_levels<AdamLists>([](cpu::AtLevel compute) {
    constexpr int64_t kNumels[] = {3, 0, 17, 40};
    const AdamOptions options{1e-2, 0.9, 0.999, 1e-8, 0.1, true, true};
    std::vector<Elements> tensors;
    std::vector<void*> data;
    for (const float x : {1.5f, -0.75f, 0.25f, 0.5f}) {
      for (const int64_t numel : kNumels) {
        tensors.emplace_back(Dtype::Float32, numel, 1);
        for (int64_t i = 0; i < numel; ++i) tensors.back().set(i, x);
      }
    }
    for (Elements& each : tensors) data.push_back(each.data());
    std::vector<AdamStep> steps;
    for (int tensor = 0; tensor < 4; ++tensor) steps.push_back(adam_step(options, 1 + tensor));
    const std::vector<Dtype> dtypes(4, Dtype::Float32);
    compute(AdamLists{{4, 4, kNumels, data.data(), dtypes.data()}, {steps.data(), true}, false}, Dtype::Float32);
    for (int tensor = 0; tensor < 4; ++tensor) {
      const Element expected = adam({1.5, -0.75, 0.25, 0.5}, options, 1 + tensor);
      for (int64_t i = 0; i < kNumels[tensor]; ++i) {
        CHECK(std::abs(tensors[tensor][i] - expected.p) < 4e-7, "tensor %d, element %d is %.9g, expected %.9g", tensor,
              int(i), tensors[tensor][i], expected.p);
      }
    }
    for (const Elements& each : tensors) CHECK(each.guards_hold(), "wrote beyond a tensor");
  });
}

// A NaN gradient reaches parameter and state in its lane, and no other.
template <class Work, class Make>
void test_nan(int lists, Make make) {
  cpu::at_all_levels<Work>([&](cpu::AtLevel compute) {
    std::vector<std::vector<float>> all(lists, std::vector<float>(35, 1.f));
    all[1][2] = all[1][34] = std::numeric_limits<float>::quiet_NaN();
    Lists list{{}, std::vector<Dtype>(lists, Dtype::Float32), 35};
    for (std::vector<float>& each : all) list.data.push_back(each.data());
    compute(make(list.tensors()), Dtype::Float32);
    for (const std::vector<float>& each : all) {
      for (size_t i = 0; i < each.size(); ++i) CHECK(std::isnan(each[i]) == (i == 2 || i == 34), "element %zu", i);
    }
  });
}

void test_nans() {
  const AdamStep step = adam_step({1e-2, 0.9, 0.999, 1e-8, 0.1, true, true}, 3);
  test_nan<AdamLists>(4, [&](TensorLists lists) { return AdamLists{lists, {&step, false}, false}; });
  test_nan<AdagradLists>(3, [](TensorLists lists) { return AdagradLists{lists, {1e-2f, 1e-10f, 0}}; });
  test_nan<LionLists>(3, [](TensorLists lists) { return LionLists{lists, lion_step(1e-2, 0.9, 0.99, 0)}; });
}

}  // namespace

int main() {
  test_adam();
  test_adam_rollback();
  test_adagrad();
  test_lion();
  test_one_element();
  test_steps_of_tensors();
  test_nans();
  return report();
}
