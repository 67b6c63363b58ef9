// The loops of ops on rows, at every level, dtype and around every vector width, against their formulas in double.
#include <array>
#include <functional>
#include <random>

#include <ds_kernels/activation.h>
#include <ds_kernels/cross_entropy.h>
#include <ds_kernels/norm.h>
#include <ds_kernels/residual.h>
#include <ds_kernels/rotary.h>
#include <ds_kernels/softmax.h>

#include "activated.h"
#include "at_levels.h"
#include "elements.h"

using namespace ds_kernels;

namespace {

constexpr int kRows = 3;

// Multiples of 1/16 between -2 and 2.
Elements numbers(Dtype dtype, size_t count, unsigned seed, float size = 1) {
  std::mt19937 random(seed);
  Elements result(dtype, count);
  for (size_t i = 0; i < count; ++i) result.set(i, size * (static_cast<int>(random() % 65) - 32) / 16.f);
  return result;
}

// Half a unit of the dtype, and what float arithmetic loses.
void close(const char* what, const Elements& actual, size_t i, double expected, double loss = 4e-6) {
  const double allowed = 0.5 * actual.unit(expected) + loss * (1 + std::abs(expected));
  CHECK(std::abs(actual[i] - expected) <= allowed, "%s: element %zu of %zu is %.9g, expected %.9g", what, i,
        actual.count(), actual[i], expected);
}

// Calls `test(compute, dtype, columns)` for all levels that run here.
template <class Work, class Test>
void in_all_cases(Test test) {
  cpu::at_all_levels<Work>([&](cpu::AtLevel compute) {
    for (const Dtype dtype : {Dtype::Float32, Dtype::BFloat16, Dtype::Float16}) {
      for (const int64_t columns : {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 65, 129, 1000}) {
        test(compute, dtype, columns);
      }
    }
  });
}

// With `far` added to the input of a layer norm: rows far from zero lose no digits.
void check_norm(cpu::AtLevel compute, Dtype dtype, int64_t columns, bool residual, bool rms, float far) {
  const size_t all = kRows * columns;
  Elements input = numbers(dtype, all, 1), added = numbers(dtype, all, 2), input_bias = numbers(dtype, columns, 3);
  for (size_t i = 0; i < all; ++i) input.set(i, static_cast<float>(input[i]) + far);
  Elements weight = numbers(dtype, columns, 4), bias = numbers(dtype, columns, 5);
  Elements output(dtype, all), sum(dtype, all);
  const NormRows rows{input.data(), residual ? added.data() : nullptr, residual ? input_bias.data() : nullptr,
                      weight.data(), rms ? nullptr : bias.data(), output.data(),
                      residual ? sum.data() : nullptr, kRows, columns, 1e-3f, rms ? 0.5f : 0.f, !rms};
  compute(rows, dtype);
  for (int row = 0; row < kRows; ++row) {
    std::vector<double> x(columns);
    double mean = 0, square = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const size_t at = row * columns + i;
      x[i] = input[at] + (residual ? added[at] + input_bias[i] : 0);
      if (residual) close("sum", sum, at, x[i]);
      mean += rms ? 0 : x[i] / columns;
    }
    for (const double each : x) square += (each - mean) * (each - mean) / columns;
    for (int64_t i = 0; i < columns; ++i) {
      const double normed = (x[i] - mean) / std::sqrt(square + 1e-3) * (weight[i] + (rms ? 0.5 : 0)) + (rms ? 0 : bias[i]);
      close(rms ? "rms_norm" : "layer_norm", output, row * columns + i, normed);
    }
  }
}

void test_norms() {
  in_all_cases<NormRows>([](cpu::AtLevel compute, Dtype dtype, int64_t columns) {
    for (const bool residual : {false, true}) {
      for (const bool rms : {false, true}) check_norm(compute, dtype, columns, residual, rms, 0);
      // 16 bits have no digits for it.
      if (dtype == Dtype::Float32) check_norm(compute, dtype, columns, residual, false, 4096);
    }
  });
}

// Scores of two heads and three queries, whose mask and alibi differ from row to row or do not.
void check_softmax(cpu::AtLevel compute, Dtype dtype, int64_t columns, bool float_mask, bool causal, int64_t window, float scale) {
  constexpr int64_t kHeads = 2, kQueries = 3;
  const Dtype mask_dtype = float_mask ? Dtype::Float32 : dtype;
  Elements scores = numbers(dtype, kHeads * kQueries * columns, 1), output(dtype, kHeads * kQueries * columns);
  Elements mask = numbers(mask_dtype, kQueries * columns, 2), alibi = numbers(mask_dtype, kHeads * columns, 3);
  const Elements before = scores;
  Scores s{};
  s.input = scores.data(), s.output = output.data();
  s.mask = {mask.data(), 0, 0, columns}, s.alibi = {alibi.data(), 0, columns, 0};
  s.batch = 1, s.heads = kHeads, s.queries = kQueries, s.keys = columns;
  s.window = window, s.scale = scale, s.causal = causal, s.float_mask = float_mask;
  compute(s, dtype);
  s.output = scores.data();
  compute(s, dtype);
  for (int64_t row = 0; row < kHeads * kQueries; ++row) {
    const int64_t query = row % kQueries, head = row / kQueries, own = columns - kQueries + query;
    std::vector<double> x(columns);
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) {
      if ((causal && i > own) || (window && i <= own - window)) continue;
      sum += x[i] = std::exp(before[row * columns + i] * scale + mask[query * columns + i] + alibi[head * columns + i]);
    }
    for (int64_t i = 0; i < columns; ++i) {
      close("softmax", output, row * columns + i, sum > 0 ? x[i] / sum : 0, 1e-6);
      CHECK(scores[row * columns + i] == output[row * columns + i], "in place, element %d of %d", int(i), int(columns));
    }
  }
}

void test_softmax() {
  in_all_cases<Scores>([](cpu::AtLevel compute, Dtype dtype, int64_t columns) {
    for (const bool float_mask : {false, true}) {
      for (const bool causal : {false, true}) {
        for (const int64_t window : {0, 1, 7}) {
          // Where no maximum is taken away, e^128 is infinite.
          for (const float scale : {0.5f, 64.f}) check_softmax(compute, dtype, columns, float_mask, causal, window, scale);
        }
      }
    }
  });
}

// A row where everything is masked gives zeros, and a NaN is not lost.
void test_softmax_without_keys() {
  const float inf = HUGE_VALF;
  cpu::at_all_levels<Scores>([=](cpu::AtLevel compute) {
    for (const bool poisoned : {false, true}) {
      std::vector<float> scores(35, 1.f), mask(35, -inf), output(35, 7.f);
      if (poisoned) scores[34] = NAN;
      const Scores s{scores.data(), output.data(), {mask.data(), 0, 0, 0}, {}, 1, 1, 1, 35, 0, 1.f, false, true};
      compute(s, Dtype::Float32);
      for (const float each : output) CHECK(poisoned ? std::isnan(each) : each == 0, "%g", each);
    }
  });
}

void test_activations() {
  in_all_cases<ActivationRows>([](cpu::AtLevel compute, Dtype dtype, int64_t columns) {
    for (int number = 0; number < kActivations; ++number) {
      const auto activation = static_cast<Activation>(number);
      Elements input = numbers(dtype, kRows * 2 * columns, 1), bias = numbers(dtype, 2 * columns, 2);
      Elements output(dtype, kRows * 2 * columns), gated(dtype, kRows * columns);
      const ActivationRows halves{input.data(), bias.data(), gated.data(), kRows, columns, activation, true};
      const ActivationRows whole{input.data(), bias.data(), output.data(), kRows, 2 * columns, activation, false};
      compute(halves, dtype);
      compute(whole, dtype);
      for (int64_t at = 0; at < kRows * 2 * columns; ++at) {
        const int64_t row = at / (2 * columns), i = at % (2 * columns);
        const double x = input[at] + bias[i];
        close("activation", output, at, activated(activation, x));
        if (i >= columns) continue;
        const double gate = activated(activation, input[at + columns] + bias[i + columns]);
        close("gated activation", gated, row * columns + i, x * gate);
      }
    }
  });
}

// One head of two tokens, which have angles of their own.
void test_rotary() {
  in_all_cases<Rotation>([](cpu::AtLevel compute, Dtype dtype, int64_t half) {
    for (const int64_t rest : {0, 3}) {
      constexpr int64_t kTokens = 2;
      const int64_t head_dim = 2 * half + rest;
      Elements cos = numbers(Dtype::Float32, kTokens * half, 2), sin = numbers(Dtype::Float32, kTokens * half, 3);
      for (const bool interleaved : {false, true}) {
        Elements input = numbers(dtype, kTokens * head_dim, 1), output(dtype, kTokens * head_dim), original = input;
        Rotation r{};
        r.input = {input.data(), kTokens * head_dim, kTokens * head_dim, head_dim}, r.output = r.input;
        r.output.data = output.data();
        r.cos = static_cast<float*>(cos.data()), r.sin = static_cast<float*>(sin.data());
        r.batch = 1, r.tokens = kTokens, r.heads = 1, r.head_dim = static_cast<int>(head_dim);
        r.rotary_dim = static_cast<int>(2 * half), r.interleaved = interleaved;
        compute(r, dtype);
        r.output = r.input;
        compute(r, dtype);
        for (int64_t at = 0; at < kTokens * half; ++at) {
          const int64_t token = at / half, i = at % half, begin = token * head_dim;
          const int64_t first = begin + (interleaved ? 2 * i : i), second = begin + (interleaved ? 2 * i + 1 : i + half);
          close("rotary", output, first, original[first] * cos[at] - original[second] * sin[at]);
          close("rotary", output, second, original[second] * cos[at] + original[first] * sin[at]);
        }
        for (int64_t i = 0; i < kTokens * head_dim; ++i) {
          CHECK(input[i] == output[i], "in place, element %d", int(i));
          if (i % head_dim >= 2 * half) CHECK(output[i] == original[i], "beyond what is turned, element %d", int(i));
        }
      }
    }
  });
}

void test_residuals() {
  in_all_cases<ResidualRows>([](cpu::AtLevel compute, Dtype dtype, int64_t columns) {
    const size_t all = kRows * columns;
    for (int omitted = 0; omitted < 8; ++omitted) {
      Elements residual = numbers(dtype, all, 1), hidden = numbers(dtype, all, 2), attention = numbers(dtype, all, 3);
      Elements attention_bias = numbers(dtype, columns, 4), final_bias = numbers(dtype, columns, 5), before = residual;
      const bool a = omitted & 1, ab = omitted & 2, fb = omitted & 4, scaled = omitted % 3 == 0;
      const ResidualRows rows{residual.data(), hidden.data(), a ? nullptr : attention.data(),
                              ab ? nullptr : attention_bias.data(), fb ? nullptr : final_bias.data(), kRows, columns,
                              0.25f, scaled};
      compute(rows, dtype);
      for (size_t at = 0; at < all; ++at) {
        const double term = a ? 0 : attention[at];
        const double sum = before[at] + (ab ? 0 : attention_bias[at % columns]) + (fb ? 0 : final_bias[at % columns]);
        close("residual", residual, at, hidden[at] + 0.25 * (sum + (scaled ? term : 0)) + (scaled ? 0 : term));
      }
    }
    Elements output = numbers(dtype, all, 1), residual = numbers(dtype, all, 2), before = output;
    Elements of_residual = numbers(dtype, columns, 3), of_output = numbers(dtype, columns, 4);
    compute(MixRows{output.data(), residual.data(), of_residual.data(), of_output.data(), kRows, columns}, dtype);
    for (size_t at = 0; at < all; ++at) {
      close("mix", output, at, before[at] * of_output[at % columns] + residual[at] * of_residual[at % columns]);
    }
  });
}

void check_cross_entropy(cpu::AtLevel compute, Dtype dtype, int64_t columns, bool options) {
  constexpr int64_t kIgnored = -100;
  const double smoothing = options ? 0.25 : 0, z_loss = options ? 0.125 : 0, cap = options ? 1.5 : 0;
  const int64_t target[kRows] = {columns - 1, kIgnored, columns / 2};
  Elements logits = numbers(dtype, kRows * columns, 1, options ? 1 : 64), kept = logits;  // e^128 is infinite
  const Elements before = logits;
  float loss[kRows], again[kRows];
  CrossEntropyRows rows{logits.data(), target, loss, kRows, columns, kIgnored, float(smoothing), float(z_loss),
                        float(cap), true};
  compute(rows, dtype);
  rows.logits = kept.data(), rows.loss = again, rows.gradient = false;
  compute(rows, dtype);
  for (int row = 0; row < kRows; ++row) {
    const bool counts = target[row] != kIgnored;
    std::vector<double> y(columns);
    double sum = 0, mean = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const double x = before[row * columns + i];
      sum += std::exp(y[i] = cap > 0 ? cap * std::tanh(x / cap) : x);
      mean += y[i] / columns;
    }
    const double l = std::log(sum), of_target = counts ? y[target[row]] : 0;
    const double expected = counts ? l - (1 - smoothing) * of_target - smoothing * mean + z_loss * l * l : 0;
    CHECK(std::abs(loss[row] - expected) <= 4e-6 * (1 + std::abs(expected)), "the loss of row %d of %d columns is %.9g, "
          "expected %.9g", row, int(columns), loss[row], expected);
    CHECK(loss[row] == again[row], "the loss of row %d of %d columns alone", row, int(columns));
    for (int64_t i = 0; i < columns; ++i) {
      const double there = i == target[row] ? 1 - smoothing : 0, slope = cap > 0 ? 1 - y[i] * y[i] / cap / cap : 1;
      const double of_y = std::exp(y[i] - l) * (1 + 2 * z_loss * l) - smoothing / columns - there;
      close("the gradient of logits", logits, row * columns + i, counts ? of_y * slope : 0);
      CHECK(kept[row * columns + i] == before[row * columns + i], "logits stay, element %d", int(i));
    }
  }
}

void test_cross_entropy() {
  in_all_cases<CrossEntropyRows>([](cpu::AtLevel compute, Dtype dtype, int64_t columns) {
    for (const bool options : {false, true}) check_cross_entropy(compute, dtype, columns, options);
  });
}

// The first target that is neither a column nor ignored.
void test_targets() {
  cpu::at_all_levels<TargetCheck>([](cpu::AtLevel compute) {
    const int64_t target[] = {0, 9, -1, 10, -2};
    for (const auto& [columns, ignored, first] : {std::array<int64_t, 3>{10, -1, 3}, {11, -1, 4}, {10, 7, 2}}) {
      const int64_t* wrong = nullptr;
      compute(TargetCheck{target, 5, columns, ignored, &wrong}, kAnyDtype);
      CHECK(wrong == target + first, "%d columns", int(columns));
      wrong = nullptr;
      compute(TargetCheck{target, first, columns, ignored, &wrong}, kAnyDtype);
      CHECK(!wrong, "%d columns, those before", int(columns));
    }
  });
}

}  // namespace

int main() {
  test_norms();
  test_cross_entropy();
  test_targets();
  test_softmax();
  test_softmax_without_keys();
  test_activations();
  test_rotary();
  test_residuals();
  return report();
}
