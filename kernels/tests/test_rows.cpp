// The loops of the inference ops, at every level, dtype and around every vector width, against their formulas in double.
#include <functional>
#include <random>

#include "activation_loops.h"
#include "check.h"
#include "elements.h"
#include "levels.h"
#include "norm_loops.h"
#include "residual_loops.h"
#include "rotary_loops.h"
#include "softmax_loops.h"

#include <ds_kernels/activation.h>

namespace ds_kernels::cpu {
DS_KERNELS_CPU_LEVELS(ActivationLoops, activation_loops)
DS_KERNELS_CPU_LEVELS(NormLoops, norm_loops)
DS_KERNELS_CPU_LEVELS(ResidualLoops, residual_loops)
DS_KERNELS_CPU_LEVELS(RotaryLoops, rotary_loops)
DS_KERNELS_CPU_LEVELS(SoftmaxLoops, softmax_loops)
}  // namespace ds_kernels::cpu

using namespace ds_kernels;

namespace {

constexpr int kRows = 3;

// Multiples of 1/16 between -2 and 2.
Elements numbers(Dtype dtype, size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Elements result(dtype, count);
  for (size_t i = 0; i < count; ++i) result.set(i, (static_cast<int>(random() % 65) - 32) / 16.f);
  return result;
}

// Half a unit of the dtype, and what float arithmetic loses.
void close(const char* what, const Elements& actual, size_t i, double expected, double loss = 4e-6) {
  const double allowed = 0.5 * actual.unit(expected) + loss * (1 + std::abs(expected));
  CHECK(std::abs(actual[i] - expected) <= allowed, "%s: element %zu of %zu is %.9g, expected %.9g", what, i,
        actual.count(), actual[i], expected);
}

// Calls `test(table, dtype, columns)` for all levels that run here.
template <class Table, size_t levels, class Test>
void at_all_levels(const cpu::Built<Table> (&built)[levels], Test test) {
  int tested = 0;
  for (const auto& [level, table] : built) {
    if (!table || !cpu::runs_here(level)) continue;
    ++tested;
    for (const Dtype dtype : {Dtype::Float32, Dtype::BFloat16, Dtype::Float16}) {
      for (const int64_t columns : {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 65, 129, 1000}) {
        test(*table, dtype, columns);
      }
    }
  }
  CHECK(tested > 0, "no level was built that runs here");
}

void test_norms() {
  at_all_levels(cpu::all_norm_loops(), [](const cpu::NormLoops& loops, Dtype dtype, int64_t columns) {
    const size_t all = kRows * columns;
    for (const bool residual : {false, true}) {
      for (const bool rms : {false, true}) {
        Elements input = numbers(dtype, all, 1), added = numbers(dtype, all, 2), input_bias = numbers(dtype, columns, 3);
        Elements weight = numbers(dtype, columns, 4), bias = numbers(dtype, columns, 5);
        Elements output(dtype, all), sum(dtype, all);
        std::vector<float> scratch(columns);
        const NormRows rows{input.data(), residual ? added.data() : nullptr, residual ? input_bias.data() : nullptr,
                                 weight.data(), rms ? nullptr : bias.data(), output.data(),
                                 residual ? sum.data() : nullptr, kRows, columns, 1e-3f};
        (rms ? loops.rms_norm : loops.layer_norm)(dtype)(rows, 0, 1, scratch.data());
        (rms ? loops.rms_norm : loops.layer_norm)(dtype)(rows, 1, kRows, scratch.data());
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
            const double normed = (x[i] - mean) / std::sqrt(square + 1e-3) * weight[i] + (rms ? 0 : bias[i]);
            close(rms ? "rms_norm" : "layer_norm", output, row * columns + i, normed);
          }
        }
      }
    }
  });
}

void test_softmax() {
  at_all_levels(cpu::all_softmax_loops(), [](const cpu::SoftmaxLoops& loops, Dtype dtype, int64_t columns) {
    for (const bool float_mask : {false, true}) {
      const Dtype mask_dtype = float_mask ? Dtype::Float32 : dtype;
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, columns}, {columns / 3, columns / 2}, {0, 0}}) {
        Elements scores = numbers(dtype, columns, 1), mask = numbers(mask_dtype, columns, 2);
        Elements alibi = numbers(mask_dtype, columns, 3), output(dtype, columns);
        std::vector<float> scratch(columns);
        std::vector<double> x(columns);
        double sum = 0;
        for (int64_t i = begin; i < end; ++i) sum += x[i] = std::exp(scores[i] * 0.5 + mask[i] + alibi[i]);
        const auto loop = loops.softmax(dtype, float_mask);
        loop({scores.data(), output.data(), mask.data(), alibi.data(), columns, begin, end, 0.5f}, scratch.data());
        loop({scores.data(), scores.data(), mask.data(), alibi.data(), columns, begin, end, 0.5f}, scratch.data());
        for (int64_t i = 0; i < columns; ++i) {
          close("softmax", output, i, sum > 0 ? x[i] / sum : 0, 1e-6);
          CHECK(scores[i] == output[i], "in place, element %d of %d", int(i), int(columns));
        }
      }
    }
  });
}

// A row where everything is masked gives zeros, and a NaN is not lost.
void test_softmax_without_keys() {
  const float inf = HUGE_VALF;
  for (const auto& [level, table] : cpu::all_softmax_loops()) {
    if (!table || !cpu::runs_here(level)) continue;
    for (const bool poisoned : {false, true}) {
      std::vector<float> scores(35, 1.f), mask(35, -inf), output(35, 7.f), scratch(35);
      if (poisoned) scores[34] = NAN;
      table->softmax(Dtype::Float32, true)(
          {scores.data(), output.data(), mask.data(), nullptr, 35, 0, 35, 1.f}, scratch.data());
      for (const float each : output) CHECK(poisoned ? std::isnan(each) : each == 0, "%g", each);
    }
  }
}

double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::Relu: return std::max(x, 0.0);
    case Activation::Gelu: return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::GeluTanh: return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::Silu: return x / (1 + std::exp(-x));
    default: return x;
  }
}

void test_activations() {
  at_all_levels(cpu::all_activation_loops(), [](const cpu::ActivationLoops& loops, Dtype dtype, int64_t columns) {
    for (int number = 0; number < kActivations; ++number) {
      const auto activation = static_cast<Activation>(number);
      Elements input = numbers(dtype, kRows * 2 * columns, 1), bias = numbers(dtype, 2 * columns, 2);
      Elements output(dtype, kRows * 2 * columns), gated(dtype, kRows * columns);
      loops.gated_activation(dtype, activation)({input.data(), bias.data(), gated.data(), kRows, columns}, 0, kRows);
      loops.bias_activation(dtype, activation)({input.data(), bias.data(), output.data(), kRows, 2 * columns}, 0, kRows);
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

void test_rotary() {
  at_all_levels(cpu::all_rotary_loops(), [](const cpu::RotaryLoops& loops, Dtype dtype, int64_t half) {
    for (const int64_t rest : {0, 3}) {
      const int64_t head_dim = 2 * half + rest;
      Elements cos = numbers(Dtype::Float32, half, 2), sin = numbers(Dtype::Float32, half, 3);
      const auto* c = static_cast<float*>(cos.data());
      const auto* s = static_cast<float*>(sin.data());
      for (const bool interleaved : {false, true}) {
        Elements input = numbers(dtype, head_dim, 1), output(dtype, head_dim), original = input;
        const auto loop = (interleaved ? loops.interleaved : loops.halves)(dtype);
        loop(input.data(), output.data(), c, s, head_dim, 2 * half);
        loop(input.data(), input.data(), c, s, head_dim, 2 * half);
        for (int64_t i = 0; i < half; ++i) {
          const int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
          close("rotary", output, first, original[first] * cos[i] - original[second] * sin[i]);
          close("rotary", output, second, original[second] * cos[i] + original[first] * sin[i]);
        }
        for (int64_t i = 0; i < head_dim; ++i) {
          CHECK(input[i] == output[i], "in place, element %d", int(i));
          if (i >= 2 * half) CHECK(output[i] == original[i], "beyond what is turned, element %d", int(i));
        }
      }
    }
  });
}

void test_residuals() {
  at_all_levels(cpu::all_residual_loops(), [](const cpu::ResidualLoops& loops, Dtype dtype, int64_t columns) {
    const size_t all = kRows * columns;
    for (int omitted = 0; omitted < 8; ++omitted) {
      Elements residual = numbers(dtype, all, 1), hidden = numbers(dtype, all, 2), attention = numbers(dtype, all, 3);
      Elements attention_bias = numbers(dtype, columns, 4), final_bias = numbers(dtype, columns, 5), before = residual;
      const bool a = omitted & 1, ab = omitted & 2, fb = omitted & 4, scaled = omitted % 3 == 0;
      loops.add_bias(dtype)({residual.data(), hidden.data(), a ? nullptr : attention.data(),
                             ab ? nullptr : attention_bias.data(), fb ? nullptr : final_bias.data(), kRows, columns,
                             0.25f, scaled},
                            0, kRows);
      for (size_t at = 0; at < all; ++at) {
        const double term = a ? 0 : attention[at];
        const double sum = before[at] + (ab ? 0 : attention_bias[at % columns]) + (fb ? 0 : final_bias[at % columns]);
        close("residual", residual, at, hidden[at] + 0.25 * (sum + (scaled ? term : 0)) + (scaled ? 0 : term));
      }
    }
    Elements output = numbers(dtype, all, 1), residual = numbers(dtype, all, 2), before = output;
    Elements of_residual = numbers(dtype, columns, 3), of_output = numbers(dtype, columns, 4);
    loops.mix(dtype)({output.data(), residual.data(), of_residual.data(), of_output.data(), kRows, columns}, 0, kRows);
    for (size_t at = 0; at < all; ++at) {
      close("mix", output, at, before[at] * of_output[at % columns] + residual[at] * of_residual[at % columns]);
    }
  });
}

}  // namespace

int main() {
  test_norms();
  test_softmax();
  test_softmax_without_keys();
  test_activations();
  test_rotary();
  test_residuals();
  return report();
}
