// What a transformer layer does between its matrix products, at all levels and in all dtypes, against the formulas in
// double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <ds_kernels/transformer.h>

#include "at_levels.h"
#include "elements.h"

using namespace ds_kernels;
using namespace ds_kernels::cpu;

namespace {

using Numbers = std::vector<double>;

// Around vectors and around the 64 columns that share random numbers.
const int64_t kColumns[] = {1, 3, 4, 7, 15, 16, 17, 33, 63, 64, 65, 130};
constexpr int64_t kRows = 5;
constexpr Dtype kDtypes[] = {Dtype::Float32, Dtype::BFloat16, Dtype::Float16};

// An array between guards, at an address that is aligned to nothing but its elements.
struct Array : Elements {
  Array(Dtype dtype, size_t count) : Elements(dtype, count, 1) {}
  Array(Dtype dtype, const Numbers& numbers) : Array(dtype, numbers.size()) {
    for (size_t i = 0; i < numbers.size(); ++i) set(i, static_cast<float>(numbers[i]));
  }
};

// Multiples of 1/16 of at most 3, which every dtype holds.
Numbers numbers(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Numbers result(count);
  for (double& x : result) x = (double(random() % 97) - 48) / 16;
  return result;
}

// Close to what is expected: rounded once, and as exact as a few floats of magnitude `scale` are.
void expect(const std::string& what, const Array& actual, const Numbers& expected, double scale = 4) {
  CHECK(actual.guards_hold(), "%s wrote beyond its array", what.c_str());
  for (size_t i = 0; i < expected.size(); ++i) {
    const double allowed = 0.501 * actual.unit(expected[i]) + scale * 4e-7;
    CHECK(std::abs(actual[i] - expected[i]) <= allowed, "%s[%zu] is %.9g, expected %.9g", what.c_str(), i, actual[i],
          expected[i]);
  }
}

void expect(const std::string& what, const std::vector<float>& actual, const Numbers& expected, double scale = 4) {
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(std::abs(actual[i] - expected[i]) <= scale * 4e-7 + 3e-7 * std::abs(expected[i]), "%s[%zu] is %.9g, expected %.9g",
          what.c_str(), i, actual[i], expected[i]);
  }
}

// ---- the generator, written anew ---------------------------------------------------------------------------------

bool is_kept(uint64_t seed, double p, int64_t row, int64_t column) {
  uint32_t c[4] = {uint32_t(column / 64 * 16 + column % 16), uint32_t(row), uint32_t(row >> 32), 0};
  uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = 0xD2511F53ull * c[0], second = 0xCD9E8D57ull * c[2];
    const uint32_t next[4] = {uint32_t(second >> 32) ^ c[1] ^ key[0], uint32_t(second),
                              uint32_t(first >> 32) ^ c[3] ^ key[1], uint32_t(first)};
    std::copy(next, next + 4, c);
    key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
  }
  return c[column / 16 % 4] >= p * 4294967296.0;
}

void test_known_answers() {
  uint32_t zeros[4] = {0, 0, 0, 0}, ones[4] = {~0u, ~0u, ~0u, ~0u};
  philox(zeros, 0, 0);
  philox(ones, ~0u, ~0u);
  const uint32_t of_zeros[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  const uint32_t of_ones[4] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
  for (int i = 0; i < 4; ++i) CHECK(zeros[i] == of_zeros[i] && ones[i] == of_ones[i], "word %d", i);
  const int64_t seed = 0x123456789abcdef;
  const Dropout dropout = with_key(dropout_of(&seed, 0.25));
  for (int64_t row : {int64_t{0}, int64_t{3}, int64_t{1} << 33}) {
    for (int64_t column = 0; column < 300; ++column) {
      CHECK((dropout_word(dropout, row, column) >= dropout.threshold) == is_kept(seed, 0.25, row, column),
            "row %lld, column %lld", static_cast<long long>(row), static_cast<long long>(column));
    }
  }
}

// ---- cases -------------------------------------------------------------------------------------------------------

constexpr auto kSeed = static_cast<int64_t>(0xfedcba9876543210u);

struct Case {
  AtLevel compute;
  Dtype dtype;
  int64_t columns;
  double p;
  std::string label;

  size_t count() const { return static_cast<size_t>(kRows * columns); }
  SeededDropout dropout() const { return p == 0 ? SeededDropout{} : dropout_of(&kSeed, p); }
  double kept(int64_t i, double x) const {
    return p == 0 ? x : is_kept(kSeed, p, i / columns, i % columns) ? x / (1 - p) : 0;
  }
};

template <class Test>
void in_all_cases(Test test) {
  at_all_levels<SumRows>([&](AtLevel compute) {
    for (const Dtype dtype : kDtypes) {
      for (const int64_t columns : kColumns) {
        for (const double p : {0.0, 0.5}) {
          const std::string label = "level " + std::to_string(int(compute.level)) + ", dtype " +
                                    std::to_string(int(dtype)) + ", " + std::to_string(columns) + " columns, p " +
                                    std::to_string(p) + ": ";
          test(Case{compute, dtype, columns, p, label});
        }
      }
    }
  });
}

// Column sums of rows.
Numbers sums_of(const Numbers& rows, int64_t columns) {
  Numbers sums(columns);
  for (size_t i = 0; i < rows.size(); ++i) sums[i % columns] += rows[i];
  return sums;
}

void test_sums() {
  in_all_cases([](const Case& c) {
    const Numbers x = numbers(c.count(), 1), bias = numbers(c.columns, 2), residual = numbers(c.count(), 3);
    Array input(c.dtype, x), b(c.dtype, bias), r(c.dtype, residual), sum(c.dtype, c.count());
    Numbers expected(c.count());
    for (size_t i = 0; i < c.count(); ++i) expected[i] = residual[i] + c.kept(i, x[i] + bias[i % c.columns]);
    SumRows rows{input.data(), b.data(), r.data(), sum.data(), kRows, c.columns, c.dropout()};
    c.compute(rows, c.dtype);
    expect(c.label + "sum", sum, expected);

    Array grad(c.dtype, c.count()), sums(c.dtype, c.columns);
    DropoutGradRows grads{input.data(), grad.data(), sums.data(), kRows, c.columns, c.dropout()};
    c.compute(grads, c.dtype);
    for (size_t i = 0; i < c.count(); ++i) expected[i] = c.kept(i, x[i]);
    expect(c.label + "gradient", grad, expected);
    expect(c.label + "gradient of bias", sums, sums_of(expected, c.columns), 40);
    grads.sums = nullptr;
    c.compute(grads, c.dtype);
    expect(c.label + "gradient alone", grad, expected);
  });
}

// With `far` added to the rows: the norm alone, which is as exact as the mean, a float.
void check_norm(const Case& c, double far) {
  Numbers x = numbers(c.count(), 1);
  for (double& each : x) each += far;
  const Numbers weight = numbers(c.columns, 2), bias = numbers(c.columns, 3);
  Array input(c.dtype, x), w(c.dtype, weight), b(c.dtype, bias), sum(c.dtype, c.count()), output(c.dtype, c.count());
  std::vector<float> mean(kRows), rstd(kRows);
  // A sum of multiples of 1/16, half of it dropped and the rest doubled, is exact in every dtype.
  TrainingNormRows rows{
      {input.data(), nullptr, nullptr, c.p != 0 ? sum.data() : nullptr, kRows, c.columns, c.dropout()},
      w.data(), b.data(), output.data(), mean.data(), rstd.data(), 0.5f};
  c.compute(rows, c.dtype);
  Numbers total(c.count()), expected(c.count()), normal(c.count()), factors(kRows), means(kRows);
  for (int64_t row = 0; row < kRows; ++row) {
    double variance = 0;
    for (int64_t i = row * c.columns; i < (row + 1) * c.columns; ++i) means[row] += (total[i] = c.kept(i, x[i]));
    means[row] /= c.columns;
    for (int64_t i = row * c.columns; i < (row + 1) * c.columns; ++i) variance += std::pow(total[i] - means[row], 2);
    factors[row] = 1 / std::sqrt(variance / c.columns + 0.5);
    for (int64_t i = row * c.columns; i < (row + 1) * c.columns; ++i) {
      normal[i] = (total[i] - means[row]) * factors[row];
      expected[i] = normal[i] * weight[i % c.columns] + bias[i % c.columns];
    }
  }
  expect(c.label + "norm", output, expected, far == 0 ? 16 : far);
  expect(c.label + "mean", mean, means);
  expect(c.label + "rstd", rstd, factors);
  if (c.p != 0) expect(c.label + "sum", sum, total);
  if (far != 0) return;

  const Numbers g = numbers(c.count(), 4), more = numbers(c.count(), 5);
  Numbers all(c.count()), dropped(c.count()), of_weight(c.count());
  for (int64_t row = 0; row < kRows; ++row) {
    double mean_g = 0, mean_gn = 0;
    for (int64_t i = row * c.columns; i < (row + 1) * c.columns; ++i) {
      mean_g += g[i] * weight[i % c.columns] / c.columns;
      mean_gn += g[i] * weight[i % c.columns] * normal[i] / c.columns;
      of_weight[i] = g[i] * normal[i];
    }
    for (int64_t i = row * c.columns; i < (row + 1) * c.columns; ++i) {
      all[i] = factors[row] * (g[i] * weight[i % c.columns] - mean_g - normal[i] * mean_gn) + more[i];
      dropped[i] = c.kept(i, all[i]);
    }
  }
  Array grad(c.dtype, g), grad_sum(c.dtype, more), grad_total(c.dtype, c.count()), grad_input(c.dtype, c.count());
  Array weight_sums(c.dtype, c.columns), bias_sums(c.dtype, c.columns), input_sums(c.dtype, c.columns);
  NormGradRows grads{grad.data(), grad_sum.data(), c.p != 0 ? sum.data() : input.data(), mean.data(), rstd.data(),
                     w.data(), nullptr, grad_total.data(), c.p != 0 ? grad_input.data() : nullptr, weight_sums.data(),
                     bias_sums.data(), input_sums.data(), kRows, c.columns, c.dropout()};
  c.compute(grads, c.dtype);
  expect(c.label + "gradient of the sum", grad_total, all, 40);
  if (c.p != 0) expect(c.label + "gradient of the input", grad_input, dropped, 80);
  expect(c.label + "gradient of weight", weight_sums, sums_of(of_weight, c.columns), 80);
  expect(c.label + "gradient of bias", bias_sums, sums_of(g, c.columns), 40);
  expect(c.label + "gradient before the sum", input_sums, sums_of(dropped, c.columns), 200);
}

void test_norms() {
  in_all_cases([](const Case& c) {
    check_norm(c, 0);
    if (c.dtype == Dtype::Float32 && c.p == 0) check_norm(c, 4096);  // 16 bits have no digits for it
  });
}

// The norm's result, 2 n + 1, instead of its input.
void test_inverted_norm() {
  in_all_cases([](const Case& c) {
    const Numbers normal = numbers(c.count(), 1), g = numbers(c.count(), 2);
    Numbers result(c.count()), expected(c.count()), of_weight(c.count());
    for (size_t i = 0; i < c.count(); ++i) result[i] = normal[i] / 2 + 1, of_weight[i] = g[i] * normal[i];
    for (int64_t row = 0; row < kRows; ++row) {
      double mean_g = 0, mean_gn = 0;
      for (int64_t i = row * c.columns; i < (row + 1) * c.columns; ++i) {
        mean_g += g[i] / 2 / c.columns;
        mean_gn += g[i] / 2 * normal[i] / c.columns;
      }
      for (int64_t i = row * c.columns; i < (row + 1) * c.columns; ++i) {
        expected[i] = 0.75 * (g[i] / 2 - mean_g - normal[i] * mean_gn);
      }
    }
    Array rows(c.dtype, result), grad(c.dtype, g), grad_total(c.dtype, c.count()), grad_input(c.dtype, c.count());
    Array w(c.dtype, Numbers(c.columns, 0.5)), b(c.dtype, Numbers(c.columns, 1));
    Array weight_sums(c.dtype, c.columns), bias_sums(c.dtype, c.columns);
    std::vector<float> rstd(kRows, 0.75f);
    NormGradRows grads{grad.data(), nullptr, rows.data(), nullptr, rstd.data(), w.data(), b.data(), grad_total.data(),
                       grad_input.data(), weight_sums.data(), bias_sums.data(), nullptr, kRows, c.columns, c.dropout()};
    c.compute(grads, c.dtype);
    Numbers dropped(c.count());
    for (size_t i = 0; i < c.count(); ++i) dropped[i] = c.kept(i, expected[i]);
    expect(c.label + "gradient", grad_total, expected, 40);
    if (c.p != 0) expect(c.label + "gradient of the input", grad_input, dropped, 80);
    expect(c.label + "gradient of weight", weight_sums, sums_of(of_weight, c.columns), 80);
    expect(c.label + "gradient of bias", bias_sums, sums_of(g, c.columns), 40);
    CHECK(grad_total.guards_hold() && grad_input.guards_hold(), "%s", c.label.c_str());
  });
}

void test_rms_norms() {
  in_all_cases([](const Case& c) {
    if (c.p != 0) return;
    const Numbers x = numbers(c.count(), 1), more = numbers(c.count(), 2), weight = numbers(c.columns, 3);
    const Numbers g = numbers(c.count(), 4), of_sum = numbers(c.count(), 5);
    for (const bool adds : {true, false}) {
      Array input(c.dtype, x), residual(c.dtype, more), w(c.dtype, weight), sum(c.dtype, c.count());
      Array output(c.dtype, c.count());
      std::vector<float> rstd(kRows);
      TrainingNormRows rows{{input.data(), nullptr, adds ? residual.data() : nullptr, adds ? sum.data() : nullptr,
                             kRows, c.columns, {}},
                            w.data(), nullptr, output.data(), nullptr, rstd.data(), 0.5f, true};
      c.compute(rows, c.dtype);
      Numbers total(c.count()), normal(c.count()), expected(c.count()), factors(kRows), all(c.count());
      Numbers of_weight(c.count());
      for (int64_t row = 0; row < kRows; ++row) {
        const int64_t first = row * c.columns, last = first + c.columns;
        double squares = 0, mean_gn = 0;
        for (int64_t i = first; i < last; ++i) total[i] = x[i] + (adds ? more[i] : 0), squares += total[i] * total[i];
        factors[row] = 1 / std::sqrt(squares / c.columns + 0.5);
        for (int64_t i = first; i < last; ++i) {
          normal[i] = total[i] * factors[row];
          expected[i] = normal[i] * weight[i % c.columns];
          mean_gn += g[i] * expected[i] / c.columns;
          of_weight[i] = g[i] * normal[i];
        }
        for (int64_t i = first; i < last; ++i) {
          all[i] = factors[row] * (g[i] * weight[i % c.columns] - normal[i] * mean_gn) + (adds ? of_sum[i] : 0);
        }
      }
      expect(c.label + "RMS norm", output, expected, 16);
      expect(c.label + "rstd of RMS norm", rstd, factors);
      if (adds) expect(c.label + "sum", sum, total);

      Array grad(c.dtype, g), grad_sum(c.dtype, of_sum), grad_total(c.dtype, c.count()), weight_sums(c.dtype, c.columns);
      NormGradRows grads{};
      grads.grad_output = grad.data();
      grads.grad_sum = adds ? grad_sum.data() : nullptr;
      grads.rows_in = adds ? sum.data() : input.data();
      grads.rstd = rstd.data();
      grads.weight = w.data();
      grads.grad_total = grad_total.data();
      grads.weight_sums = weight_sums.data();
      grads.rows = kRows, grads.columns = c.columns, grads.rms = true;
      c.compute(grads, c.dtype);
      expect(c.label + "gradient of the sum of RMS norm", grad_total, all, 40);
      expect(c.label + "gradient of RMS norm's weight", weight_sums, sums_of(of_weight, c.columns), 80);
    }
  });
}

double gelu(double x, bool tanh) {
  return tanh ? x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)))
              : x / 2 * (1 + std::erf(x / std::sqrt(2)));
}

double gelu_derivative(double x, bool tanh) {
  if (!tanh) return (1 + std::erf(x / std::sqrt(2))) / 2 + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
  const double t = std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
  return (1 + t) / 2 + x / 2 * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

void test_gelu() {
  in_all_cases([](const Case& c) {
    if (c.p != 0) return;
    const Numbers x = numbers(c.count(), 1), bias = numbers(c.columns, 2), g = numbers(c.count(), 3);
    for (const bool tanh : {true, false}) {
      Array input(c.dtype, x), b(c.dtype, bias), grad(c.dtype, g), output(c.dtype, c.count()), result(c.dtype, c.count());
      Numbers expected(c.count()), slopes(c.count());
      for (size_t i = 0; i < c.count(); ++i) {
        expected[i] = gelu(x[i] + bias[i % c.columns], tanh);
        slopes[i] = g[i] * gelu_derivative(x[i] + bias[i % c.columns], tanh);
      }
      c.compute(GeluRows{input.data(), b.data(), output.data(), kRows, c.columns, tanh}, c.dtype);
      expect(c.label + "gelu", output, expected);
      Array sums(c.dtype, c.columns);
      const GeluGradRows grads{grad.data(), input.data(), b.data(), result.data(), sums.data(), kRows, c.columns, tanh};
      c.compute(grads, c.dtype);
      expect(c.label + "gradient of gelu", result, slopes);
      expect(c.label + "gradient of bias", sums, sums_of(slopes, c.columns), 40);
    }
  });
}

// An activation, and its derivative.
std::pair<double, double> activated(Activation activation, double x) {
  const double s = 1 / (1 + std::exp(-x));
  switch (activation) {
    case Activation::Relu: return {std::max(x, 0.0), x > 0};
    case Activation::Gelu: return {gelu(x, false), gelu_derivative(x, false)};
    case Activation::GeluTanh: return {gelu(x, true), gelu_derivative(x, true)};
    case Activation::Silu: return {x * s, s + x * s * (1 - s)};
    default: return {x, 1};
  }
}

void test_gates() {
  in_all_cases([](const Case& c) {
    if (c.p != 0) return;
    const Numbers x = numbers(c.count(), 1), y = numbers(c.count(), 2), g = numbers(c.count(), 3);
    for (int number = 0; number < kActivations; ++number) {
      const auto activation = static_cast<Activation>(number);
      const std::string label = c.label + "activation " + std::to_string(number) + ": ";
      Array gate(c.dtype, x), up(c.dtype, y), grad(c.dtype, g), output(c.dtype, c.count());
      Array grad_gate(c.dtype, c.count()), grad_up(c.dtype, c.count());
      Numbers expected(c.count()), of_gate(c.count()), of_up(c.count());
      for (size_t i = 0; i < c.count(); ++i) {
        const auto [value, slope] = activated(activation, x[i]);
        expected[i] = value * y[i], of_gate[i] = g[i] * y[i] * slope, of_up[i] = g[i] * value;
      }
      c.compute(GateRows{gate.data(), up.data(), output.data(), kRows, c.columns, activation}, c.dtype);
      expect(label + "gate", output, expected, 16);
      const GateGradRows grads{grad.data(), gate.data(), up.data(), grad_gate.data(), grad_up.data(),
                               kRows, c.columns, activation};
      c.compute(grads, c.dtype);
      expect(label + "gradient of gate", grad_gate, of_gate, 16);
      expect(label + "gradient of up", grad_up, of_up, 16);
    }
  });
}

void test_softmax() {
  in_all_cases([](const Case& c) {
    const Numbers x = numbers(c.count(), 1), masked = numbers(kRows * c.columns, 2), g = numbers(c.count(), 3);
    // Rows are [kRows, 1]; the mask has a row for each, and none, and one number for each. Where no maximum is taken
    // away, e^192 is infinite.
    for (const auto& [kind, scale] : {std::pair{0, 0.5f}, {1, 0.5f}, {2, 0.5f}, {1, 64.f}}) {
      Array scores(c.dtype, x), mask(c.dtype, masked), output(c.dtype, c.count()), probs(c.dtype, c.count());
      const int64_t stride = kind == 1 ? c.columns : 1;
      MaskedSoftmaxRows rows{scores.data(), kind ? mask.data() : nullptr, {1, 1, kRows, 1}, {0, 0, stride, 0},
                             kind == 2, output.data(), c.p != 0 ? probs.data() : nullptr, kRows, c.columns, scale,
                             c.dropout()};
      c.compute(rows, c.dtype);
      Numbers expected(c.count()), dropped(c.count()), slopes(c.count());
      for (int64_t row = 0; row < kRows; ++row) {
        double sum = 0, inner = 0;
        for (int64_t i = row * c.columns; i < (row + 1) * c.columns; ++i) {
          const double added = kind == 0 ? 0 : kind == 1 ? masked[i] : masked[row];
          sum += expected[i] = std::exp(x[i] * scale + added);
        }
        for (int64_t i = row * c.columns; i < (row + 1) * c.columns; ++i) dropped[i] = c.kept(i, expected[i] /= sum);
        const Array& used = c.p != 0 ? probs : output;
        for (int64_t i = row * c.columns; i < (row + 1) * c.columns; ++i) inner += c.kept(i, g[i]) * used[i];
        for (int64_t i = row * c.columns; i < (row + 1) * c.columns; ++i) {
          slopes[i] = scale * used[i] * (c.kept(i, g[i]) - inner);
        }
      }
      // Float16 has only absolute digits for small numbers.
      expect(c.label + "softmax", output, dropped, 1);
      if (c.p != 0) expect(c.label + "softmax before dropout", probs, expected, 1);

      Array grad(c.dtype, g), result(c.dtype, c.count());
      SoftmaxGradRows grads{grad.data(), c.p != 0 ? probs.data() : output.data(), result.data(), kRows, c.columns,
                            scale, c.dropout()};
      c.compute(grads, c.dtype);
      expect(c.label + "gradient of softmax", result, slopes, 16 * scale);
    }
  });
}

// Sums of columns over many parts of rows do not depend on how many threads share them.
void test_parts() {
  at_all_levels<DropoutGradRows>([](AtLevel compute) {
    constexpr int64_t kMany = 1000, kFew = 70;
    const Numbers x = numbers(kMany * kFew, 1);
    for (const Dtype dtype : kDtypes) {
      Array grad(dtype, x), result(dtype, x.size()), one(dtype, kFew), three(dtype, kFew);
      DropoutGradRows rows{grad.data(), result.data(), one.data(), kMany, kFew, {}};
      compute(rows, dtype, Shares(1));
      rows.sums = three.data();
      compute(rows, dtype, Shares(3, true));
      expect("sums of many rows", one, sums_of(x, kFew), 100);
      for (int64_t i = 0; i < kFew; ++i) CHECK(one[i] == three[i], "column %d: %g, %g", int(i), one[i], three[i]);
    }
  });
}

// What is not finite: a row of -inf gives zeros, gelu's slope saturates, a NaN stays in its row.
void test_not_finite() {
  const float inf = INFINITY, nan = std::numeric_limits<float>::quiet_NaN();
  at_all_levels<MaskedSoftmaxRows>([=](AtLevel compute) {
    std::vector<float> scores(3 * 20, -inf), output(60);
    std::fill(scores.begin() + 20, scores.end(), 1.f);
    scores[45] = nan;
    MaskedSoftmaxRows rows{scores.data(), nullptr, {1, 1, 1, 3}, {}, false, output.data(), nullptr, 3, 20, 1.f, {}};
    compute(rows, Dtype::Float32);
    for (int i = 0; i < 20; ++i) {
      CHECK(output[i] == 0 && std::abs(output[20 + i] - 0.05f) < 1e-8f && std::isnan(output[40 + i]), "column %d", i);
    }
    for (const bool tanh : {true, false}) {
      const std::vector<float> x{inf, -inf, nan, 3e38f, -3e38f, 0.f}, g(6, 1.f);
      std::vector<float> slope(6);
      const GeluGradRows grads{g.data(), x.data(), nullptr, slope.data(), nullptr, 1, 6, tanh};
      compute(grads, Dtype::Float32);
      CHECK(slope[0] == 1 && std::abs(slope[1]) < 1e-30f && std::isnan(slope[2]) && slope[3] == 1 &&
                std::abs(slope[4]) < 1e-30f && slope[5] == 0.5f,
            "slopes of gelu: %g %g %g %g %g %g", slope[0], slope[1], slope[2], slope[3], slope[4], slope[5]);
    }
  });
}

}  // namespace

int main() {
  test_known_answers();
  test_sums();
  test_norms();
  test_inverted_norm();
  test_rms_norms();
  test_gelu();
  test_gates();
  test_softmax();
  test_parts();
  test_not_finite();
  return report();
}
