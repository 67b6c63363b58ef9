// The CUDA kernels of every family against the formulas in double: on a GPU, built by nvcc, or on the host, built with
// cuda_on_host.
//
//     test_cuda            arrays lie between guards, which must stay as they are
//     test_cuda exact      arrays end where their memory ends: for a sanitizer, which then sees what is read beyond
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <ds_kernels/activation.h>
#include <ds_kernels/adagrad.h>
#include <ds_kernels/adam.h>
#include <ds_kernels/attention.h>
#include <ds_kernels/cross_entropy.h>
#include <ds_kernels/evoformer_attn.h>
#include <ds_kernels/fp_quantizer.h>
#include <ds_kernels/lamb.h>
#include <ds_kernels/linear.h>
#include <ds_kernels/lion.h>
#include <ds_kernels/norm.h>
#include <ds_kernels/philox.h>
#include <ds_kernels/quantizer.h>
#include <ds_kernels/random_ltd.h>
#include <ds_kernels/residual.h>
#include <ds_kernels/rotary.h>
#include <ds_kernels/softmax.h>
#include <ds_kernels/spatial.h>
#include <ds_kernels/transformer.h>

#include "../cuda/attention_bias.h"
#include "activated.h"
#include "check.h"
#include "device_arrays.h"
#include "int4.h"

using namespace ds_kernels;

namespace {

// ---- multi-tensor ops --------------------------------------------------------------------------------------------

struct Mix {
  Dtype params;
  bool float_grads, float_states;

  Dtype of(size_t list) const { return list == 0 || !(list == 1 ? float_grads : float_states) ? params : Dtype::Float32; }
};

const Mix kMixes[] = {{Dtype::Float32, true, true},   {Dtype::BFloat16, false, false}, {Dtype::BFloat16, false, true},
                      {Dtype::BFloat16, true, false}, {Dtype::BFloat16, true, true},   {Dtype::Float16, false, false},
                      {Dtype::Float16, false, true},  {Dtype::Float16, true, false},   {Dtype::Float16, true, true}};

struct Case {
  const char* name;
  std::vector<int64_t> numels;
  int offset;  // elements by which the first list is off an aligned address
};

std::vector<Case> cases() {
  std::vector<int64_t> many(300);  // more than a launch takes
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<int64_t>(i % 23);
  return {{"tails", {1, 3, 4, 7, 8, 9, 255, 257, 2047, 2049}, 0},
          {"chunks", {0, 4095, 4096, 4097, 8192 + 5, 0, 1}, 0},
          {"not aligned", {1, 17, 4097, 5000}, 1},
          {"many", many, 0}};
}

// One element in double: of each list, changed in place, given the tensor's index.
using Formula = std::function<void(std::vector<double>& x, size_t tensor)>;
using Launcher = std::function<void(const TensorLists&)>;

void check_multi_tensor(const char* op, size_t lists, const Case& which, const Mix& mix, const Launcher& launcher,
                        const Formula& formula) {
  std::mt19937 random(7);
  std::vector<std::unique_ptr<Array>> arrays;
  std::vector<void*> data;
  std::vector<Dtype> dtypes;
  for (size_t list = 0; list < lists; ++list) {
    dtypes.push_back(mix.of(list));
    for (const int64_t numel : which.numels) {
      arrays.push_back(std::make_unique<Array>(mix.of(list), numel, list == 0 ? which.offset : 0));
      for (int64_t i = 0; i < numel; ++i) {
        const float size = std::ldexp(1.f + static_cast<float>(random() % 64) / 64, static_cast<int>(random() % 4) - 3);
        arrays.back()->set(i, list >= 2 || random() % 2 ? size : -size);  // second moments are not negative
      }
      arrays.back()->to_device();
      data.push_back(arrays.back()->data());
    }
  }
  std::vector<std::vector<double>> expected, before;
  const size_t count = which.numels.size();
  for (size_t tensor = 0; tensor < count; ++tensor) {
    for (int64_t i = 0; i < which.numels[tensor]; ++i) {
      std::vector<double> x(lists);
      for (size_t list = 0; list < lists; ++list) x[list] = (*arrays[list * count + tensor])[i];
      before.push_back(x);
      formula(x, tensor);
      expected.push_back(x);
    }
  }
  launcher({lists, count, which.numels.data(), data.data(), dtypes.data()});
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
  for (auto& array : arrays) array->from_device();
  size_t next = 0;
  for (size_t tensor = 0; tensor < count; ++tensor) {
    for (int64_t i = 0; i < which.numels[tensor]; ++i, ++next) {
      for (size_t list = 0; list < lists; ++list) {
        const Array& array = *arrays[list * count + tensor];
        const double want = expected[next][list];
        // Half a unit for the rounding, and a few of float32, of the larger of new and old, for the arithmetic.
        const double scale = std::max(std::abs(want), std::abs(before[next][list]));
        const double allowed = (mix.of(list) == Dtype::Float32 ? 0 : 0.5 * array.unit(want)) + 1e-6 * scale;
        CHECK(std::abs(array[i] - want) <= allowed, "%s %s %s: list %zu, tensor %zu, element %lld: %.9g, expected %.9g",
              op, which.name, name_of(mix.params), list, tensor, static_cast<long long>(i), array[i], want);
      }
    }
  }
  for (auto& array : arrays) CHECK(array->guards_hold(), "%s %s %s", op, which.name, name_of(mix.params));
}

void check_adam(const Case& which, const Mix& mix, bool adamw) {
  const AdamOptions options{0.01, 0.9, 0.99, 1e-8, 0.1, adamw, true};
  std::vector<AdamStep> steps;  // one each: 3, 4, 5, 3 ...
  for (size_t i = 0; i < which.numels.size(); ++i) steps.push_back(adam_step(options, 3 + static_cast<int64_t>(i % 3)));
  check_multi_tensor(
      "adam_", 4, which, mix,
      [&](const TensorLists& tensors) {
        compute("adam_", AdamLists{tensors, {steps.data(), true}, false}, mix.params);
      },
      [&](std::vector<double>& x, size_t tensor) {
        const double t = 3 + static_cast<double>(tensor % 3), c1 = 1 - std::pow(0.9, t), c2 = 1 - std::pow(0.99, t);
        const double g = adamw ? x[1] : x[1] + 0.1 * x[0];
        const double decayed = adamw ? x[0] - 0.01 * 0.1 * x[0] : x[0];
        x[2] = 0.9 * x[2] + 0.1 * g;
        x[3] = 0.99 * x[3] + 0.01 * g * g;
        x[0] = decayed - 0.01 / c1 * x[2] / (std::sqrt(x[3]) / std::sqrt(c2) + 1e-8);
      });
}

// Undoes a step, of floats alone.
void check_rollback(const Case& which) {
  const AdamStep step = adam_step({0.01, 0.9, 0.99, 1e-8, 0.1, true, true}, 3);
  check_multi_tensor(
      "adam_rollback_", 4, which, kMixes[0],
      [&](const TensorLists& tensors) {
        compute("adam_rollback_", AdamLists{tensors, {&step, false}, true}, Dtype::Float32);
      },
      [](std::vector<double>& x, size_t) {
        const double c1 = 1 - std::pow(0.9, 3), c2 = 1 - std::pow(0.99, 3);
        x[0] = (x[0] + 0.01 / c1 * x[2] / (std::sqrt(x[3]) / std::sqrt(c2) + 1e-8)) / (1 - 0.01 * 0.1);
        x[2] = (x[2] - 0.1 * x[1]) / 0.9;
        x[3] = std::max((x[3] - 0.01 * x[1] * x[1]) / 0.99, 0.0);
      });
}

void check_adagrad(const Case& which, const Mix& mix) {
  check_multi_tensor(
      "adagrad_", 3, which, mix,
      [&](const TensorLists& tensors) {
        compute("adagrad_", AdagradLists{tensors, {0.01f, 1e-8f, 0.1f}}, mix.params);
      },
      [](std::vector<double>& x, size_t) {
        const double g = x[1] + 0.1 * x[0];
        x[2] += g * g;
        x[0] -= 0.01 * g / (std::sqrt(x[2]) + 1e-8);
      });
}

void check_lion(const Case& which, const Mix& mix) {
  check_multi_tensor(
      "lion_", 3, which, mix,
      [&](const TensorLists& tensors) {
        compute("lion_", LionLists{tensors, lion_step(0.01, 0.75, 0.99, 0.1)}, mix.params);
      },
      [](std::vector<double>& x, size_t) {
        const double c = 0.75 * x[2] + 0.25 * x[1];  // exact in float32 too: the sign of a sum that cancels
        x[0] -= 0.01 * 0.1 * x[0] + 0.01 * (c > 0 ? 1 : c < 0 ? -1 : 0);
        x[2] = 0.99 * x[2] + 0.01 * x[1];
      });
}

// ---- ops with reductions -------------------------------------------------------------------------------------------

// One tensor of many chunks and one of none: the ratio, which all chunks of a tensor must agree on.
void check_lamb(Dtype dtype) {
  const std::vector<int64_t> numels{100'003, 0};
  const int64_t count = numels[0];
  std::vector<std::unique_ptr<Array>> arrays;
  std::vector<void*> data;
  std::mt19937 random(7);
  for (size_t list = 0; list < 4; ++list) {
    arrays.push_back(std::make_unique<Array>(dtype, count, 0));
    for (int64_t i = 0; i < count; ++i) arrays[list]->set(i, 0.5f + static_cast<float>(random() % 64) / 64);
    arrays[list]->to_device();
    data.insert(data.end(), {arrays[list]->data(), arrays[list]->data()});
  }
  double squares[2] = {};
  std::vector<double> expected[4];  // of each list
  for (int64_t i = 0; i < count; ++i) {
    const double p = (*arrays[0])[i], g = (*arrays[1])[i];
    const double m = 0.9 * (*arrays[2])[i] + 0.1 * g, v = 0.99 * (*arrays[3])[i] + 0.01 * g * g;
    const double update = m / (std::sqrt(v) + 1e-6) + 0.1 * p;
    squares[0] += p * p;
    squares[1] += update * update;
    expected[0].push_back(update), expected[1].push_back(g), expected[2].push_back(m), expected[3].push_back(v);
  }
  const double ratio = std::sqrt(squares[0] / squares[1]);
  for (int64_t i = 0; i < count; ++i) expected[0][i] = (*arrays[0])[i] - 0.5 * ratio * expected[0][i];

  Array ratios(Dtype::Float32, 2, 0);
  ratios.to_device();
  const LambStep step = lamb_step({0.5, 0.9, 0.99, 1e-6, 0.1, 0, 100, 1, false, false, false}, 1);
  const std::vector<Dtype> dtypes(4, dtype);
  const TensorLists tensors{4, 2, numels.data(), data.data(), dtypes.data()};
  compute("lamb_", LambLists{tensors, {&step, false}, static_cast<float*>(ratios.data())}, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "lamb_");
  ratios.from_device();
  const double precision = dtype == Dtype::Float32 ? 1e-6 : 0.01;  // moments are rounded before they are used
  CHECK(std::abs(ratios[0] - ratio) <= precision * ratio, "lamb_: %.9g, expected %.9g", ratios[0], ratio);
  CHECK(ratios[1] == 1, "lamb_: %.9g", ratios[1]);
  for (size_t list = 0; list < 4; ++list) {
    Array& array = *arrays[list];
    array.from_device();
    for (int64_t i = 0; i < count; ++i) {
      const double want = expected[list][i], rounding = dtype == Dtype::Float32 ? 0 : 0.5 * array.unit(want);
      CHECK(std::abs(array[i] - want) <= (list == 0 ? precision : 1e-6) + rounding,
            "lamb_: list %zu, element %lld: %.9g, expected %.9g", list, static_cast<long long>(i), array[i], want);
    }
    CHECK(array.guards_hold(), "lamb_");
  }
  CHECK(ratios.guards_hold(), "lamb_");
}

// Rows of elements 0.5 ... 2.5, with `far` added, `halves` times as many as columns come out; `formula` changes a row in double.
void check_rows(const char* op, Dtype dtype, int64_t columns, const std::function<void(void*, void*)>& launcher,
                const std::function<void(std::vector<double>&)>& formula, int64_t halves = 1, int64_t rows = 3,
                float far = 0, double loss = 4e-6) {
  Array input(dtype, rows * halves * columns, 0), output(dtype, rows * columns, 0);
  std::mt19937 random(7);
  for (int64_t i = 0; i < input.count(); ++i) input.set(i, far + 0.5f + static_cast<float>(random() % 64) / 32);
  input.to_device();
  output.to_device();
  launcher(input.data(), output.data());
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
  output.from_device();
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<double> x(halves * columns);
    for (int64_t i = 0; i < halves * columns; ++i) x[i] = input[row * halves * columns + i];
    formula(x);
    for (int64_t i = 0; i < columns; ++i) {
      const double got = output[row * columns + i];
      const double allowed = (dtype == Dtype::Float32 ? 0 : 0.5 * output.unit(x[i])) + loss * (1 + std::abs(x[i]));
      CHECK(std::abs(got - x[i]) <= allowed, "%s %s of %lld: row %lld, column %lld: %.9g, expected %.9g", op,
            name_of(dtype), static_cast<long long>(columns), static_cast<long long>(row), static_cast<long long>(i), got,
            x[i]);
    }
  }
  CHECK(output.guards_hold(), "%s", op);
}

void check_norm(Dtype dtype, int64_t rows, int64_t columns, bool centred, bool has_residual, float far = 0) {
  Array weight(dtype, columns, 0), bias(dtype, columns, 0), sum(dtype, rows * columns, 0);
  for (int64_t i = 0; i < columns; ++i) {
    weight.set(i, 1.5f + static_cast<float>(i % 8) / 4), bias.set(i, 0.25f * static_cast<float>(i % 4));
  }
  weight.to_device();
  bias.to_device();
  sum.to_device();
  check_rows(
      centred ? "layer_norm" : "rms_norm", dtype, columns,
      [&](void* input, void* output) {
        NormRows work{};
        work.input = input, work.output = output, work.weight = weight.data();
        if (centred) work.bias = bias.data();
        if (has_residual) work.residual = input, work.sum = sum.data();
        work.rows = rows, work.columns = columns, work.eps = 1e-5f, work.centred = centred, work.weight_offset = 0.5f;
        compute("norm", work, dtype);
      },
      [&](std::vector<double>& x) {
        double mean = 0, variance = 0;
        for (double& value : x) value *= has_residual ? 2 : 1;
        for (const double value : x) mean += centred ? value / static_cast<double>(columns) : 0;
        for (const double value : x) variance += (value - mean) * (value - mean) / static_cast<double>(columns);
        for (int64_t i = 0; i < columns; ++i) {
          x[i] = (x[i] - mean) / std::sqrt(variance + 1e-5) * (weight[i] + 0.5) + (centred ? bias[i] : 0);
        }
      },
      1, rows, far);
}

// Where no maximum is taken away, e^160 is infinite: with a scale of 64.
void check_softmax(Dtype dtype, int64_t rows, int64_t columns, float scale) {
  check_rows(
      "softmax", dtype, columns,
      [&](void* input, void* output) {
        const Scores scores{input, output, {}, {}, 1, 1, rows, columns, 0, scale, false, false};
        compute("softmax", scores, dtype);
      },
      [=](std::vector<double>& x) {
        double sum = 0;
        for (double& value : x) sum += value = std::exp(scale * value);
        for (double& value : x) value /= sum;
      },
      1, rows);
}

// The mask tells which batch, head and query a row is taken for: all of its scores but one are -inf.
void check_softmax_places(Dtype dtype, int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
  const int64_t rows = batch * heads * queries;
  Array scores(dtype, rows * keys, 0), mask(Dtype::Float32, rows * keys, 0);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t key = 0; key < keys; ++key) {
      scores.set(row * keys + key, 1.f);
      mask.set(row * keys + key, key == row * 5 % keys ? 0.f : -INFINITY);
    }
  }
  scores.to_device();
  mask.to_device();
  const Added added{mask.data(), heads * queries * keys, queries * keys, keys};
  compute("softmax_", Scores{scores.data(), scores.data(), added, {}, batch, heads, queries, keys, 0, 1.f, false, true},
          dtype);
  scores.from_device();
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t key = 0; key < keys; ++key) {
      CHECK(scores[row * keys + key] == (key == row * 5 % keys), "softmax_: row %lld, key %lld",
            static_cast<long long>(row), static_cast<long long>(key));
    }
  }
  CHECK(scores.guards_hold(), "softmax_");
}

// With smoothing and z-loss; the target is the last column.
void check_cross_entropy(Dtype dtype, int64_t columns, float softcap) {
  const int64_t last = columns - 1;
  const Numbers<int64_t> target({last, last, last});
  Numbers<float> losses(std::vector<float>(3, -1.f));
  std::vector<float> expected;
  check_rows(
      "cross_entropy_", dtype, columns,
      [&](void* input, void* output) {
        std::vector<unsigned char> logits(3 * columns * (dtype == Dtype::Float32 ? 4 : 2));
        cudaMemcpy(logits.data(), input, logits.size(), cudaMemcpyDeviceToHost);
        cudaMemcpy(output, logits.data(), logits.size(), cudaMemcpyHostToDevice);
        const CrossEntropyRows rows{output, target.data(), losses.data(), 3, columns, -1, 0.25f, 0.125f, softcap, true};
        compute("cross_entropy_", rows, dtype);
      },
      [&](std::vector<double>& x) {
        double sum = 0, mean = 0;
        std::vector<double> slope(x.size(), 1);
        for (int64_t i = 0; i < columns; ++i) {
          const double bent = softcap > 0 ? std::tanh(x[i] / softcap) : 0;
          if (softcap > 0) x[i] = softcap * bent, slope[i] = 1 - bent * bent;
          sum += std::exp(x[i]), mean += x[i] / static_cast<double>(columns);
        }
        const double l = std::log(sum);
        expected.push_back(static_cast<float>(l - 0.75 * x[last] - 0.25 * mean + 0.125 * l * l));
        for (int64_t i = 0; i < columns; ++i) {
          const double there = i == last ? 0.75 : 0, smooth = 0.25 / static_cast<double>(columns);
          x[i] = (std::exp(x[i] - l) * (1 + 0.25 * l) - smooth - there) * slope[i];
        }
      });
  const std::vector<float> got = losses.values("cross_entropy_");
  for (int row = 0; row < 3; ++row) {
    const double allowed = 1e-5 * (1 + std::abs(expected[row]));
    CHECK(std::abs(got[row] - expected[row]) <= allowed, "cross_entropy_ of %lld: %.9g, expected %.9g",
          static_cast<long long>(columns), got[row], expected[row]);
  }
}

// Logits that grow along the row, after many of -inf: sums are rescaled, and some threads have nothing but -inf first.
void check_growing_cross_entropy(Dtype dtype, int64_t columns, float smoothing) {
  Array logits(dtype, columns, 0);
  double top = -INFINITY, sum = 0, mean = 0;
  const int64_t target = columns - 1, masked = smoothing > 0 ? 0 : columns / 2;
  for (int64_t i = 0; i < columns; ++i) {
    logits.set(i, i < masked ? -INFINITY : -96.f + static_cast<float>(i * 64 / columns) + static_cast<float>(i % 3));
    top = std::max(top, logits[i]);
    mean += logits[i] / static_cast<double>(columns);
  }
  std::vector<double> before(columns);
  for (int64_t i = 0; i < columns; ++i) sum += std::exp((before[i] = logits[i]) - top);
  logits.to_device();
  const Numbers<int64_t> targets({target});
  Numbers<float> losses(std::vector<float>(1, -1.f));
  compute("cross_entropy_",
          CrossEntropyRows{logits.data(), targets.data(), losses.data(), 1, columns, -1, smoothing, 0, 0, true}, dtype);
  logits.from_device();
  const double l = top + std::log(sum), smooth = smoothing > 0 ? smoothing * mean : 0;
  const double loss = l - (1 - smoothing) * before[target] - smooth, got = losses.values("cross_entropy_")[0];
  CHECK(std::abs(got - loss) <= 1e-5 * (1 + std::abs(loss)), "cross_entropy_ of %lld: %.9g, expected %.9g",
        static_cast<long long>(columns), got, loss);
  for (int64_t i = 0; i < columns; ++i) {
    const double there = i == target ? 1 - smoothing : 0;
    const double want = std::exp(before[i] - l) - smoothing / static_cast<double>(columns) - there;
    const double allowed = (dtype == Dtype::Float32 ? 0 : 0.5 * logits.unit(want)) + 4e-6 * (1 + std::abs(want));
    CHECK(std::abs(logits[i] - want) <= allowed, "cross_entropy_ of %lld: column %lld: %.9g, expected %.9g",
          static_cast<long long>(columns), static_cast<long long>(i), logits[i], want);
  }
  CHECK(logits.guards_hold(), "cross_entropy_");
}

// ---- ops on elements -------------------------------------------------------------------------------------------------

// Gives an array numbers of either sign, 0.5 ... 1.5 in size.
void fill(Array& array, unsigned seed) {
  std::mt19937 random(seed);
  for (int64_t i = 0; i < array.count(); ++i) {
    const float size = 0.5f + static_cast<float>(random() % 64) / 64;
    array.set(i, random() % 2 ? size : -size);
  }
  array.to_device();
}

void check_element(const char* op, Dtype dtype, const Array& array, int64_t i, double expected) {
  const double allowed = (dtype == Dtype::Float32 ? 0 : 0.5 * array.unit(expected)) + 4e-6 * (1 + std::abs(expected));
  CHECK(std::abs(array[i] - expected) <= allowed, "%s %s: element %lld of %lld: %.9g, expected %.9g", op, name_of(dtype),
        static_cast<long long>(i), static_cast<long long>(array.count()), array[i], expected);
}

void check_activation(Dtype dtype, int64_t columns, Activation activation, bool gated) {
  const int64_t halves = gated ? 2 : 1, last = (halves - 1) * columns;  // the half that is activated
  Array bias(dtype, halves * columns, 0);
  for (int64_t i = 0; i < bias.count(); ++i) bias.set(i, i % 3 ? -1.75f : 0.25f);
  bias.to_device();
  check_rows(
      gated ? "gated_activation" : "bias_activation", dtype, columns,
      [&](void* input, void* output) {
        const ActivationRows rows{input, bias.data(), output, 3, columns, activation, gated};
        compute(gated ? "gated_activation" : "bias_activation", rows, dtype);
      },
      [&](std::vector<double>& x) {
        for (int64_t i = 0; i < columns; ++i) {
          const double y = activated(activation, x[last + i] + bias[last + i]);
          x[i] = gated ? (x[i] + bias[i]) * y : y;
        }
      },
      halves);
}

void check_add_bias(Dtype dtype, int64_t columns, bool scale_attention) {
  constexpr int64_t kRows = 3;
  Array residual(dtype, kRows * columns, 0), hidden(dtype, kRows * columns, 0), attention(dtype, kRows * columns, 0);
  Array attention_bias(dtype, columns, 0), final_bias(dtype, columns, 0);
  unsigned seed = 0;
  for (Array* array : {&residual, &hidden, &attention, &attention_bias, &final_bias}) fill(*array, ++seed);
  std::vector<double> expected;
  for (int64_t i = 0; i < residual.count(); ++i) {
    const double biased = residual[i] + attention_bias[i % columns] + final_bias[i % columns];
    expected.push_back(hidden[i] + (scale_attention ? 0.5 * (biased + attention[i]) : 0.5 * biased + attention[i]));
  }
  const ResidualRows rows{residual.data(), hidden.data(), attention.data(), attention_bias.data(), final_bias.data(),
                          kRows, columns, 0.5f, scale_attention};
  compute("residual_add_bias_", rows, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "residual_add_bias_");
  residual.from_device();
  for (int64_t i = 0; i < residual.count(); ++i) check_element("residual_add_bias_", dtype, residual, i, expected[i]);
  CHECK(residual.guards_hold(), "residual_add_bias_");
}

void check_mix(Dtype dtype, int64_t columns) {
  constexpr int64_t kRows = 3;
  Array output(dtype, kRows * columns, 0), residual(dtype, kRows * columns, 0);
  Array residual_weight(dtype, columns, 0), output_weight(dtype, columns, 0);
  unsigned seed = 0;
  for (Array* array : {&output, &residual, &residual_weight, &output_weight}) fill(*array, ++seed);
  std::vector<double> expected;
  for (int64_t i = 0; i < output.count(); ++i) {
    expected.push_back(output[i] * output_weight[i % columns] + residual[i] * residual_weight[i % columns]);
  }
  const MixRows rows{output.data(), residual.data(), residual_weight.data(), output_weight.data(), kRows, columns};
  compute("moe_res_matmul_", rows, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "moe_res_matmul_");
  output.from_device();
  for (int64_t i = 0; i < output.count(); ++i) check_element("moe_res_matmul_", dtype, output, i, expected[i]);
  CHECK(output.guards_hold(), "moe_res_matmul_");
}

// Heads that lie after their tokens, as a layer's product gives them, into contiguous ones or in place.
void check_rotary(Dtype dtype, int head_dim, int rotary_dim, bool interleaved, bool in_place) {
  constexpr int64_t kBatch = 2, kTokens = 3;
  constexpr int kHeads = 5;
  const int half = rotary_dim / 2;
  const int64_t of_batch = kTokens * kHeads * head_dim;
  Array input(dtype, kBatch * of_batch, 0), output(dtype, kBatch * of_batch, 0);
  Array cos(Dtype::Float32, kTokens * half, 0), sin(Dtype::Float32, kTokens * half, 0);
  unsigned seed = 0;
  for (Array* array : {&input, &output, &cos, &sin}) fill(*array, ++seed);
  const Heads from{input.data(), of_batch, head_dim, kHeads * head_dim};
  const Heads to = in_place ? from : Heads{output.data(), of_batch, kTokens * head_dim, head_dim};
  std::vector<double> expected(kBatch * of_batch);
  for (int64_t i = 0; i < kBatch * of_batch; ++i) {
    const int d = static_cast<int>(i % head_dim);
    const int64_t head = i / head_dim % kHeads, token = i / head_dim / kHeads % kTokens, batch = i / of_batch;
    double& turned = expected[batch * to.batch + head * to.head + token * to.token + d];
    turned = input[i];
    if (d >= rotary_dim) continue;
    const bool first = interleaved ? d % 2 == 0 : d < half;
    const int64_t distance = interleaved ? 1 : half, angle = token * half + (interleaved ? d / 2 : d % half);
    const double partner = input[first ? i + distance : i - distance];
    turned = input[i] * cos[angle] + (first ? -partner : partner) * sin[angle];
  }
  Rotation rotation{};
  rotation.input = from, rotation.output = to;
  rotation.cos = static_cast<const float*>(cos.data()), rotation.sin = static_cast<const float*>(sin.data());
  rotation.batch = kBatch, rotation.tokens = kTokens, rotation.heads = kHeads;
  rotation.head_dim = head_dim, rotation.rotary_dim = rotary_dim, rotation.interleaved = interleaved;
  compute("rotary", rotation, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "rotary");
  Array& result = in_place ? input : output;
  result.from_device();
  for (int64_t i = 0; i < result.count(); ++i) check_element("rotary", dtype, result, i, expected[i]);
  CHECK(result.guards_hold(), "rotary");
}

void check_bias_add(Dtype dtype, int64_t columns, int terms) {
  constexpr int64_t kRows = 3;
  Array input(dtype, kRows * columns, 0), other(dtype, kRows * columns, 0), output(dtype, kRows * columns, 0);
  Array bias(dtype, columns, 0), other_bias(dtype, columns, 0);
  unsigned seed = 0;
  for (Array* array : {&input, &other, &output, &bias, &other_bias}) fill(*array, ++seed);
  const BiasRows rows{input.data(), bias.data(), terms > 2 ? other.data() : nullptr,
                      terms > 3 ? other_bias.data() : nullptr, output.data(), kRows, columns};
  compute("nhwc_bias_add", rows, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "nhwc_bias_add");
  output.from_device();
  for (int64_t i = 0; i < output.count(); ++i) {
    const double sum = input[i] + bias[i % columns], added = terms > 2 ? other[i] : 0;
    check_element("nhwc_bias_add", dtype, output, i, sum + added + (terms > 3 ? other_bias[i % columns] : 0));
  }
  CHECK(output.guards_hold(), "nhwc_bias_add");
}

// ---- training ------------------------------------------------------------------------------------------------------

// Rows far from zero: the norm is as exact as the mean, a float, and 1 / sqrt(variance) loses nothing.
void check_far_training_norm(int64_t columns) {
  constexpr int64_t kRows = 3;
  const char* op = "dropout_add_layer_norm";
  Array input(Dtype::Float32, kRows * columns, 0), output(Dtype::Float32, kRows * columns, 0);
  Array weight(Dtype::Float32, columns, 0), bias(Dtype::Float32, columns, 0);
  Array mean(Dtype::Float32, kRows, 0), rstd(Dtype::Float32, kRows, 0);
  for (int64_t i = 0; i < columns; ++i) weight.set(i, 1.5f), bias.set(i, 0.25f);
  for (int64_t i = 0; i < kRows * columns; ++i) input.set(i, 4096.f + static_cast<float>(i * 37 % 65) / 16);
  for (Array* array : {&input, &output, &weight, &bias, &mean, &rstd}) array->to_device();
  compute(op,
          TrainingNormRows{{input.data(), nullptr, nullptr, nullptr, kRows, columns, {}}, weight.data(), bias.data(),
                           output.data(), static_cast<float*>(mean.data()), static_cast<float*>(rstd.data()), 0.5f},
          Dtype::Float32);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
  for (Array* array : {&output, &mean, &rstd}) array->from_device();
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t first = row * columns;
    double average = 0, variance = 0;
    for (int64_t i = 0; i < columns; ++i) average += input[first + i] / static_cast<double>(columns);
    for (int64_t i = 0; i < columns; ++i) variance += std::pow(input[first + i] - average, 2) / static_cast<double>(columns);
    const double factor = 1 / std::sqrt(variance + 0.5);
    CHECK(std::abs(mean[row] - average) <= 1e-3, "%s: mean %.9g, expected %.9g", op, mean[row], average);
    CHECK(std::abs(rstd[row] - factor) <= 4e-6 * factor, "%s: rstd %.9g, expected %.9g", op, rstd[row], factor);
    for (int64_t i = 0; i < columns; ++i) {
      const double want = (input[first + i] - average) * factor * 1.5 + 0.25;
      CHECK(std::abs(output[first + i] - want) <= 2e-3, "%s: %.9g, expected %.9g", op, output[first + i], want);
    }
  }
  for (const Array* array : {&output, &mean, &rstd}) CHECK(array->guards_hold(), "%s", op);
}

// The norm of a sum, and its gradient, without dropout. With `everything` there are a bias of the input, a gradient of
// the sum and all sums of columns.
void check_norm_gradient(Dtype dtype, int64_t rows, int64_t columns, bool rms, bool everything) {
  const char* op = rms ? "add_rms_norm" : "dropout_add_layer_norm";
  const int64_t count = rows * columns;
  Array input(dtype, count, 0), residual(dtype, count, 0), grad(dtype, count, 0), grad_sum(dtype, count, 0);
  Array sum(dtype, count, 0), output(dtype, count, 0), total(dtype, count, 0);
  Array weight(dtype, columns, 0), bias(dtype, columns, 0), input_bias(dtype, columns, 0);
  Array weight_sums(dtype, columns, 0), bias_sums(dtype, columns, 0), input_sums(dtype, columns, 0);
  Array mean(Dtype::Float32, rows, 0), rstd(Dtype::Float32, rows, 0);
  unsigned seed = 0;
  for (Array* array : {&input, &residual, &grad, &grad_sum, &weight, &bias, &input_bias}) fill(*array, ++seed);
  const std::vector<Array*> results{&sum, &output, &total, &weight_sums, &bias_sums, &input_sums, &mean, &rstd};
  for (Array* array : results) array->to_device();
  TrainingNormRows n{};
  n.sum.input = input.data(), n.sum.residual = residual.data(), n.sum.sum = sum.data();
  n.sum.rows = rows, n.sum.columns = columns;
  if (everything) n.sum.bias = input_bias.data();
  n.weight = weight.data(), n.output = output.data(), n.rstd = static_cast<float*>(rstd.data());
  n.eps = 1e-2f, n.rms = rms;
  if (!rms) n.bias = bias.data(), n.mean = static_cast<float*>(mean.data());
  compute(op, n, dtype);
  NormGradRows g{};
  g.grad_output = grad.data(), g.rows_in = sum.data(), g.rstd = n.rstd, g.mean = n.mean, g.weight = weight.data();
  g.grad_total = total.data(), g.weight_sums = weight_sums.data(), g.rows = rows, g.columns = columns, g.rms = rms;
  if (!rms) g.bias = bias.data(), g.bias_sums = bias_sums.data();
  if (everything) g.grad_sum = grad_sum.data(), g.input_sums = input_sums.data();
  compute(op, g, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
  for (Array* array : results) array->from_device();
  std::vector<double> of_weight(columns), of_bias(columns), of_input(columns);
  const auto size = static_cast<double>(columns);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = row * columns;
    double average = 0, variance = 0, mean_g = 0, mean_gn = 0;
    for (int64_t i = 0; i < columns; ++i) {
      check_element(op, dtype, sum, first + i, input[first + i] + residual[first + i] + (everything ? input_bias[i] : 0));
      average += rms ? 0 : sum[first + i] / size;
    }
    for (int64_t i = 0; i < columns; ++i) variance += (sum[first + i] - average) * (sum[first + i] - average) / size;
    const double factor = 1 / std::sqrt(variance + 1e-2);
    if (!rms) check_element(op, Dtype::Float32, mean, row, average);
    check_element(op, Dtype::Float32, rstd, row, factor);
    const auto normal = [&](int64_t i) { return (sum[first + i] - average) * factor; };
    for (int64_t i = 0; i < columns; ++i) {
      check_element(op, dtype, output, first + i, normal(i) * weight[i] + (rms ? 0 : bias[i]));
      mean_g += rms ? 0 : grad[first + i] * weight[i] / size;
      mean_gn += grad[first + i] * weight[i] * normal(i) / size;
    }
    for (int64_t i = 0; i < columns; ++i) {
      const double slope = factor * (grad[first + i] * weight[i] - mean_g - normal(i) * mean_gn);
      const double expected = slope + (everything ? grad_sum[first + i] : 0);
      check_element(op, dtype, total, first + i, expected);
      of_weight[i] += grad[first + i] * normal(i), of_bias[i] += grad[first + i], of_input[i] += expected;
    }
  }
  const auto check_sums = [&](const Array& sums, const std::vector<double>& expected) {
    for (int64_t i = 0; i < columns; ++i) {
      const double allowed = (dtype == Dtype::Float32 ? 0 : 0.5 * sums.unit(expected[i])) + 1e-5 * (1 + std::sqrt(rows));
      CHECK(std::abs(sums[i] - expected[i]) <= allowed, "%s %s, %lld rows of %lld: sum of column %lld: %.9g, expected %.9g",
            op, name_of(dtype), static_cast<long long>(rows), static_cast<long long>(columns), static_cast<long long>(i),
            sums[i], expected[i]);
    }
  };
  check_sums(weight_sums, of_weight);
  if (!rms) check_sums(bias_sums, of_bias);
  if (everything) check_sums(input_sums, of_input);
  for (const Array* array : results) CHECK(array->guards_hold(), "%s", op);
}

// The same seed drops the same elements as on the CPU.
void check_dropout(Dtype dtype, int64_t columns) {
  constexpr int64_t kSeed = 0x123456789abcdef;
  Array seed(Dtype::Float32, 2, 0);
  cudaMemcpy(seed.data(), &kSeed, sizeof kSeed, cudaMemcpyHostToDevice);
  const Dropout dropout = with_key(dropout_of(&kSeed, 0.25));
  int64_t row = 0;
  check_rows(
      "dropout_add", dtype, columns,
      [&](void* input, void* output) {
        const SeededDropout seeded = dropout_of(static_cast<const int64_t*>(seed.data()), 0.25);
        compute("dropout_add", SumRows{input, nullptr, nullptr, output, 3, columns, seeded}, dtype);
      },
      [&](std::vector<double>& x) {
        for (int64_t i = 0; i < columns; ++i) {
          x[i] = dropout_word(dropout, row, i) < dropout.threshold ? 0 : x[i] / 0.75;
        }
        ++row;
      });
}

void check_masked_softmax(Dtype dtype, int64_t columns, float scale) {
  check_rows(
      "masked_softmax_dropout", dtype, columns,
      [&](void* input, void* output) {
        MaskedSoftmaxRows rows{};
        rows.scores = input, rows.output = output, rows.rows = 3, rows.columns = columns, rows.scale = scale;
        compute("masked_softmax_dropout", rows, dtype);
      },
      [=](std::vector<double>& x) {
        double sum = 0;
        for (double& value : x) sum += value = std::exp(scale * value);
        for (double& value : x) value /= sum;
      });
}

// With dropout, whose elements are those of the CPU.
void check_softmax_gradient(Dtype dtype, int64_t columns) {
  constexpr int64_t kRows = 3, kSeed = 0x123456789abcdef;
  const char* op = "masked_softmax_dropout_backward";
  Array grad(dtype, kRows * columns, 0), probs(dtype, kRows * columns, 0), result(dtype, kRows * columns, 0);
  Numbers<int64_t> seed({kSeed});
  fill(grad, 1);
  for (int64_t i = 0; i < probs.count(); ++i) probs.set(i, static_cast<float>(i % 17) / 64);
  for (Array* array : {&probs, &result}) array->to_device();
  for (const double p : {0.0, 0.25}) {
    const Dropout dropout = with_key(dropout_of(&kSeed, p));
    const SeededDropout seeded = p == 0 ? SeededDropout{} : dropout_of(seed.data(), p);
    compute(op, SoftmaxGradRows{grad.data(), probs.data(), result.data(), kRows, columns, 0.5f, seeded}, dtype);
    CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
    result.from_device();
    for (int64_t row = 0; row < kRows; ++row) {
      std::vector<double> kept(columns);
      double inner = 0, size = 1;
      for (int64_t i = 0; i < columns; ++i) {
        const bool dropped = p != 0 && dropout_word(dropout, row, i) < dropout.threshold;
        kept[i] = dropped ? 0 : grad[row * columns + i] / (1 - p);
        inner += kept[i] * probs[row * columns + i], size += std::abs(kept[i] * probs[row * columns + i]);
      }
      for (int64_t i = 0; i < columns; ++i) {
        const double want = 0.5 * probs[row * columns + i] * (kept[i] - inner), got = result[row * columns + i];
        const double allowed = (dtype == Dtype::Float32 ? 0 : 0.5 * result.unit(want)) + 1e-6 * size;
        CHECK(std::abs(got - want) <= allowed, "%s %s of %lld, dropping %g: %.9g, expected %.9g", op, name_of(dtype),
              static_cast<long long>(columns), p, got, want);
      }
    }
    CHECK(result.guards_hold(), "%s", op);
  }
}

// An activation's derivative.
double slope_of(Activation activation, double x) {
  const double s = 1 / (1 + std::exp(-x)), t = std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
  switch (activation) {
    case Activation::Relu: return x > 0;
    case Activation::Gelu:
      return (1 + std::erf(x / std::sqrt(2.0))) / 2 + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    case Activation::GeluTanh:
      return (1 + t) / 2 + x / 2 * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    case Activation::Silu: return s + x * s * (1 - s);
    default: return 1;
  }
}

void check_gate(Dtype dtype, int64_t columns, Activation activation) {
  constexpr int64_t kRows = 3;
  Array gate(dtype, kRows * columns, 0), up(dtype, kRows * columns, 0), grad(dtype, kRows * columns, 0);
  Array output(dtype, kRows * columns, 0), of_gate(dtype, kRows * columns, 0), of_up(dtype, kRows * columns, 0);
  unsigned seed = 0;
  for (Array* array : {&gate, &up, &grad}) fill(*array, ++seed);
  for (Array* array : {&output, &of_gate, &of_up}) array->to_device();
  compute("gate", GateRows{gate.data(), up.data(), output.data(), kRows, columns, activation}, dtype);
  compute("gate_backward",
          GateGradRows{grad.data(), gate.data(), up.data(), of_gate.data(), of_up.data(), kRows, columns, activation},
          dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "gate");
  for (Array* array : {&output, &of_gate, &of_up}) array->from_device();
  for (int64_t i = 0; i < output.count(); ++i) {
    const double value = activated(activation, gate[i]);
    check_element("gate", dtype, output, i, value * up[i]);
    check_element("gate_backward, gate", dtype, of_gate, i, grad[i] * up[i] * slope_of(activation, gate[i]));
    check_element("gate_backward, up", dtype, of_up, i, grad[i] * value);
  }
  for (const Array* array : {&output, &of_gate, &of_up}) CHECK(array->guards_hold(), "gate");
}

void check_gelu(Dtype dtype, int64_t rows, int64_t columns, bool tanh) {
  Array input(dtype, rows * columns, 0), bias(dtype, columns, 0), grad(dtype, rows * columns, 0);
  Array output(dtype, rows * columns, 0), of_input(dtype, rows * columns, 0), sums(dtype, columns, 0);
  unsigned seed = 0;
  for (Array* array : {&input, &bias, &grad}) fill(*array, ++seed);
  for (Array* array : {&output, &of_input, &sums}) array->to_device();
  compute("bias_gelu", GeluRows{input.data(), bias.data(), output.data(), rows, columns, tanh}, dtype);
  compute("bias_gelu_backward",
          GeluGradRows{grad.data(), input.data(), bias.data(), of_input.data(), sums.data(), rows, columns, tanh}, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "bias_gelu");
  for (Array* array : {&output, &of_input, &sums}) array->from_device();
  const Activation activation = tanh ? Activation::GeluTanh : Activation::Gelu;
  std::vector<double> of_bias(columns);
  for (int64_t i = 0; i < output.count(); ++i) {
    const double x = input[i] + bias[i % columns], slope = grad[i] * slope_of(activation, x);
    check_element("bias_gelu", dtype, output, i, activated(activation, x));
    check_element("bias_gelu_backward", dtype, of_input, i, slope);
    of_bias[i % columns] += slope;
  }
  for (int64_t i = 0; i < columns; ++i) {
    const double allowed = (dtype == Dtype::Float32 ? 0 : 0.5 * sums.unit(of_bias[i])) + 1e-5 * (1 + std::sqrt(rows));
    CHECK(std::abs(sums[i] - of_bias[i]) <= allowed, "bias_gelu_backward %s: sum of column %lld: %.9g, expected %.9g",
          name_of(dtype), static_cast<long long>(i), sums[i], of_bias[i]);
  }
  for (const Array* array : {&output, &of_input, &sums}) CHECK(array->guards_hold(), "bias_gelu");
}

// Sums of columns: of a gradient that is passed through as it is.
void check_column_sums(Dtype dtype, int64_t rows, int64_t columns) {
  Array grad(dtype, rows * columns, 0), result(dtype, rows * columns, 0), total(dtype, columns, 0);
  std::vector<double> expected(columns);
  for (int64_t i = 0; i < rows * columns; ++i) {
    grad.set(i, static_cast<float>(i % 7 - 3) / 4);
    expected[i % columns] += grad[i];
  }
  for (Array* array : {&grad, &result, &total}) array->to_device();
  const DropoutGradRows grads{grad.data(), result.data(), total.data(), rows, columns, {}};
  compute("dropout_add_backward", grads, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "dropout_add_backward");
  for (Array* array : {&result, &total}) array->from_device();
  for (int64_t i = 0; i < columns; ++i) {  // sums of quarters are exact in float32
    CHECK(std::abs(total[i] - expected[i]) <= (dtype == Dtype::Float32 ? 0 : 0.5 * total.unit(expected[i])),
          "dropout_add_backward: column %lld is %g, expected %g", static_cast<long long>(i), total[i], expected[i]);
  }
  for (int64_t i = 0; i < rows * columns; ++i) {
    CHECK(result[i] == grad[i], "dropout_add_backward: element %lld", static_cast<long long>(i));
  }
  for (const Array* array : {&result, &total}) CHECK(array->guards_hold(), "dropout_add_backward");
}

// ---- quantizer -----------------------------------------------------------------------------------------------------

// Quantized and dequantized again.
void check_quantizer(Dtype dtype, int64_t size, int bits, bool symmetric) {
  Array levels(Dtype::BFloat16, 3 * size * bits / 16 + 1, 0), params(Dtype::Float32, 6, 0);
  for (Array* array : {&levels, &params}) array->to_device();
  auto* numbers = static_cast<float*>(params.data());
  check_rows(
      "quantize", dtype, size,
      [&](void* input, void* output) {
        const Levels as{bits, symmetric};
        compute("quantize", QuantizeGroups{input, levels.data(), numbers, 3, size, as, {}}, dtype);
        compute("dequantize", DequantizeGroups{levels.data(), numbers, output, 3, size, as}, dtype);
      },
      [&](std::vector<double>& x) {
        double low = x[0], high = x[0];
        for (const double value : x) low = std::min(low, value), high = std::max(high, value);
        const double span = symmetric ? 2 * high : high - low, offset = symmetric ? 0 : (high + low) / 2;
        const double scale = span == 0 ? 1 : (1 << bits) / span, half = 1 << (bits - 1);
        for (double& value : x) {
          const double level = std::min(std::max(std::nearbyint((value - offset) * scale), -half), half - 1);
          value = level / scale + offset;
        }
      });
  params.from_device();
  levels.from_device();
  CHECK(params.guards_hold() && levels.guards_hold(), "quantize");
}

// Level `i` as it lies in memory.
int level_of(const std::vector<uint8_t>& levels, int64_t i, int bits) {
  if (bits == 8) return static_cast<int8_t>(levels[i]);
  const int nibble = i % 2 ? levels[i / 2] & 15 : levels[i / 2] >> 4;
  return nibble >= 8 ? nibble - 16 : nibble;
}

std::vector<uint8_t> some_bytes(int64_t count) {
  std::mt19937 random(3);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& each : bytes) each = static_cast<uint8_t>(random());
  return bytes;
}

// Runs of two groups, of 2 slices, 3 nodes and 2 devices each, from [node, device, slice] to [slice, device, node].
void check_swizzle(int64_t size, int bits) {
  constexpr int64_t kSlices = 2, kNodes = 3, kDevices = 2, kRun = 2, kAll = kSlices * kNodes * kDevices * kRun;
  const char* op = "swizzle_quant";
  Array x(Dtype::BFloat16, kAll * size, 0);
  fill(x, 1);
  std::vector<uint8_t> levels[2];
  std::vector<float> params[2];
  for (const bool moves : {false, true}) {
    Numbers<uint8_t> to(std::vector<uint8_t>(kAll * size * bits / 8));
    Numbers<float> of_groups(std::vector<float>(2 * kAll));
    const Swizzle swizzle = moves ? Swizzle{kSlices, kNodes, kDevices, kRun} : Swizzle{};
    compute(op, QuantizeGroups{x.data(), to.data(), of_groups.data(), kAll, size, {bits, false}, swizzle}, Dtype::BFloat16);
    levels[moves] = to.values(op), params[moves] = of_groups.values(op);
  }
  for (int64_t to = 0; to < kAll; ++to) {
    const int64_t node = to / kRun % kNodes, device = to / kRun / kNodes % kDevices, slice = to / kRun / kNodes / kDevices;
    const int64_t from = ((node * kDevices + device) * kSlices + slice) * kRun + to % kRun;
    for (int64_t i = 0; i < size; ++i) {
      CHECK(level_of(levels[1], to * size + i, bits) == level_of(levels[0], from * size + i, bits), "%s: group %lld", op,
            static_cast<long long>(to));
    }
    for (int i = 0; i < 2; ++i) {
      CHECK(params[1][2 * to + i] == params[0][2 * from + i], "%s: params of group %lld", op, static_cast<long long>(to));
    }
  }
}

// What three devices sent, in groups that are not those of the sum.
void check_reduce(int64_t received_size, int bits, bool symmetric) {
  constexpr int64_t kDevices = 3, kReceived = 4;
  const char* op = "quantized_reduction";
  const int64_t n = kReceived * received_size, columns = symmetric ? 1 : 2;
  const std::vector<uint8_t> sent = some_bytes(kDevices * n * bits / 8);
  std::vector<float> params(kDevices * kReceived * columns);
  for (size_t i = 0; i < params.size(); ++i) params[i] = static_cast<float>(1 + i * 5 % 8) / 8;
  std::vector<double> total(n);
  for (int64_t i = 0; i < kDevices * n; ++i) {
    const float* p = &params[i / received_size * columns];
    total[i % n] += level_of(sent, i, bits) * double{p[0]} + (symmetric ? 0 : p[1]);
  }
  Numbers<uint8_t> received(sent);
  Numbers<float> received_params(params);
  for (const int64_t groups : {1, 2}) {
    Numbers<uint8_t> levels(std::vector<uint8_t>(n * bits / 8));
    Numbers<float> results(std::vector<float>(groups * columns));
    compute(op,
            ReduceGroups{received.data(), received_params.data(), kDevices, received_size, levels.data(), results.data(),
                         groups, n / groups, {bits, symmetric}},
            kAnyDtype);
    const std::vector<uint8_t> out = levels.values(op);
    const std::vector<float> of_groups = results.values(op);
    for (int64_t i = 0; i < n; ++i) {
      const float* p = &of_groups[i / (n / groups) * columns];
      const int level = level_of(out, i, bits);
      const double value = level * double{p[0]} + (symmetric ? 0 : p[1]);
      // Half a step; a whole one beyond the last level.
      const double allowed = p[0] * (level == (1 << (bits - 1)) - 1 ? 1.001 : 0.501);
      CHECK(std::abs(value - total[i]) <= allowed, "%s to int%d of %lld: %g, expected %g", op, bits,
            static_cast<long long>(n), value, total[i]);
    }
  }
}

void check_dequantize_range(Dtype dtype, int64_t size, int bits) {
  constexpr int64_t kGroups = 3;
  const char* op = "dequantize_int4_to_half";
  const std::vector<uint8_t> bytes = some_bytes(kGroups * size * bits / 8);
  Numbers<uint8_t> levels(bytes);
  Array scale(dtype, kGroups, 0), minimum(dtype, kGroups, 0), x(dtype, kGroups * size, 0);
  for (int i = 0; i < kGroups; ++i) scale.set(i, i == 1 ? 8.f : 4.f), minimum.set(i, static_cast<float>(i) - 1.5f);
  for (Array* array : {&scale, &minimum, &x}) array->to_device();
  compute(op, DequantizeRangeGroups{levels.data(), scale.data(), minimum.data(), x.data(), kGroups, size, bits}, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
  x.from_device();
  for (int64_t i = 0; i < x.count(); ++i) {
    const int level = level_of(bytes, i, bits) & ((1 << bits) - 1);
    check_element(op, dtype, x, i, level / scale[i / size] + minimum[i / size]);
  }
  CHECK(x.guards_hold(), "%s", op);
}

void check_fake_quantize(Dtype dtype, int64_t size, int bits, bool symmetric) {
  constexpr int64_t kGroups = 3;
  const char* op = "ds_quantizer";
  Numbers<float> noise(std::vector<float>(kGroups * size, 0.9f));
  for (const float* random : {static_cast<const float*>(nullptr), static_cast<const float*>(noise.data())}) {
    Array x(dtype, kGroups * size, 0);
    std::mt19937 generator(4);
    for (int64_t i = 0; i < x.count(); ++i) {  // both ends of each group's range among them
      const float part = i % size == 0 ? 1.f : i % size == 1 ? -1.f : static_cast<float>(generator() % 513) / 256 - 1;
      x.set(i, part * (i / size == 1 ? 2.f : 0.5f));
    }
    x.to_device();
    std::vector<double> expected;
    for (int64_t i = 0; i < x.count(); ++i) {
      const double largest = i / size == 1 ? 2 : 0.5, low = symmetric ? 0 : -largest;
      const double step = (2 * largest + 1e-5) / (1 << bits), top = (1 << (bits - 1)) - 1, exact = (x[i] - low) / step;
      const double level = random ? std::floor(exact + 0.9) : std::nearbyint(exact);
      expected.push_back((symmetric ? std::min(std::max(level, -top - 1), top) : level) * step + low);
    }
    compute(op, FakeQuantizeGroups{x.data(), random, kGroups, size, bits, symmetric}, dtype);
    CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
    x.from_device();
    for (int64_t i = 0; i < x.count(); ++i) check_element(op, dtype, x, i, expected[i]);
    CHECK(x.guards_hold(), "%s", op);
  }
}

// ---- small floating-point numbers ----------------------------------------------------------------------------------

double fp_number_value(uint32_t number, const FpFormat& f) {
  const uint32_t magnitude = number & f.most();
  const int exponent = static_cast<int>(magnitude >> f.mantissa), one = 1 << f.mantissa;
  const int power = exponent - ((1 << (f.exponent - 1)) - 1) - f.mantissa;
  const double size = magnitude ? std::ldexp(one + static_cast<int>(magnitude % one), power) : 0;
  return number >> (f.bits() - 1) ? -size : size;
}

// Every number is read right; of random values each becomes the nearest one.
void check_fp_quantizer(Dtype dtype, const FpFormat& f) {
  const char* op = "fp_quantizer";
  const int64_t size = int64_t{1} << f.bits(), row_bytes = fp_row_bytes(size, f);
  std::vector<uint8_t> bytes(row_bytes);
  for (int64_t bit = 0; bit < size * f.bits(); ++bit) {
    if (bit / f.bits() >> bit % f.bits() & 1) bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] | 1 << bit % 8);
  }
  fp_store_scale(0.25f, bytes.data() + row_bytes - kScaleBytes);  // float16 has all numbers of all formats so
  Numbers<uint8_t> stored(bytes);
  Array all(dtype, size, 0);
  all.to_device();
  compute(op, FpDequantizeGroups{stored.data(), all.data(), 1, size, f}, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
  all.from_device();
  for (int64_t i = 0; i < size; ++i) {
    const double want = fp_number_value(static_cast<uint32_t>(i), f) / 4;
    CHECK(all[i] == want, "%s: number %lld of %d bits is %g, not %g", op, static_cast<long long>(i), f.bits(), all[i], want);
  }
  CHECK(all.guards_hold(), "%s", op);

  constexpr int64_t kGroups = 5, kSize = 72;
  const double largest = fp_number_value(f.most(), f), least = fp_number_value(f.least(), f);
  const int steps = dtype == Dtype::BFloat16 ? 128 : 1024;
  Array x(dtype, kGroups * kSize, 0), back(dtype, kGroups * kSize, 0);
  std::mt19937 random(3);
  for (int64_t i = 0; i < x.count(); ++i) {
    const float part = static_cast<float>(static_cast<int>(random() % (2 * steps)) - steps) / static_cast<float>(steps);
    const float size_of_part = std::ldexp(0.25f, static_cast<int>(random() % 3));
    x.set(i, i % kSize == 40 ? static_cast<float>(largest / 4) : part * size_of_part);
  }
  for (Array* array : {&x, &back}) array->to_device();
  Numbers<uint8_t> nearest(std::vector<uint8_t>(kGroups * fp_row_bytes(kSize, f)));
  compute(op, FpQuantizeGroups{x.data(), nullptr, nearest.data(), kGroups, kSize, f}, dtype);
  compute(op, FpDequantizeGroups{nearest.data(), back.data(), kGroups, kSize, f}, dtype);
  nearest.values(op);
  back.from_device();
  for (int64_t i = 0; i < x.count(); ++i) {
    const double v = 4 * x[i], got = 4 * back[i];
    const bool tiny = v != 0 && std::abs(v) < least;  // only 0 becomes 0
    const double want = tiny ? std::copysign(least, v) : std::min(v, largest);
    const double allowed = v == 0 || tiny ? 0 : std::ldexp(0.5, std::ilogb(v) - f.mantissa);
    CHECK(std::abs(got - want) <= allowed, "%s: %d bits: %g became %g", op, f.bits(), v, got);
  }
  CHECK(back.guards_hold(), "%s", op);

  // Noise of 0 rounds down, of nearly 1 up.
  const double step = std::ldexp(least, -f.mantissa);
  Numbers<float> values([&] {
    std::vector<float> eight(8, static_cast<float>(least + step / 4));
    eight[7] = static_cast<float>(largest);
    return eight;
  }());
  const std::vector<float> chances{0, 0, 0.7f, 0.8f, 0.9f, 0, 0.99f, 0};
  Numbers<float> noise(chances), rounded(std::vector<float>(8));
  Numbers<uint8_t> by_chance(std::vector<uint8_t>(fp_row_bytes(8, f)));
  compute(op, FpQuantizeGroups{values.data(), noise.data(), by_chance.data(), 1, 8, f}, Dtype::Float32);
  compute(op, FpDequantizeGroups{by_chance.data(), rounded.data(), 1, 8, f}, Dtype::Float32);
  by_chance.values(op);
  const std::vector<float> results = rounded.values(op);
  for (int i = 0; i < 7; ++i) {
    const double want = chances[i] < 0.75f ? least : least + step;
    CHECK(results[i] == want, "%s: %d bits: noise %g gave %g, not %g", op, f.bits(), chances[i], results[i], want);
  }
}

// ---- decoding ------------------------------------------------------------------------------------------------------

// Where weights lie: bytes by which the first is off an aligned address, and bytes between rows.
struct Layout {
  int64_t shift, gap;
};

// Quantized weights with their scales and offsets; or, of 16 bits, elements of that dtype.
struct Weights {
  int64_t rows, columns, groups;
  int bits;
  Layout layout;
  std::vector<int8_t> levels;
  std::vector<float> scales, offsets;
  std::vector<uint8_t> bytes;

  Weights(int64_t rows, int64_t columns, int64_t groups, int bits, bool has_offsets, Layout layout,
          Dtype dtype = Dtype::Float16)
      : rows(rows), columns(columns), groups(groups), bits(bits), layout(layout), levels(rows * columns) {
    for (size_t i = 0; i < levels.size(); ++i) levels[i] = static_cast<int8_t>((i * 37 + i / 64) % 255 - 127);
    const std::vector<Int4Pair> pairs = bits == 4 ? pairs_of(levels) : std::vector<Int4Pair>{};
    const std::vector<uint8_t> elements = bits == 16 ? elements_of(levels, dtype) : std::vector<uint8_t>{};
    const auto* from = bits == 4    ? reinterpret_cast<const uint8_t*>(pairs.data())
                       : bits == 16 ? elements.data()
                                    : reinterpret_cast<const uint8_t*>(levels.data());
    bytes.assign(layout.shift, 0xee);
    for (int64_t row = 0; row < rows; ++row) {
      if (row > 0) bytes.insert(bytes.end(), layout.gap, 0xee);
      bytes.insert(bytes.end(), from + row * row_bytes(), from + (row + 1) * row_bytes());
    }
    for (int64_t i = 0; i < rows * groups && bits < 16; ++i) {
      scales.push_back(static_cast<float>(1 + i % 5) / 64);
      if (has_offsets) offsets.push_back(static_cast<float>(i % 7 - 3) / 32);
    }
  }

  int64_t row_bytes() const { return columns * bits / 8; }
  double step(int64_t row, int64_t column) const {
    return (scales.empty() ? 1. : double{scales[group(row, column)]}) * at(row, column);
  }
  double offset(int64_t row, int64_t column) const { return offsets.empty() ? 0. : double{offsets[group(row, column)]}; }

 private:
  static std::vector<uint8_t> elements_of(const std::vector<int8_t>& levels, Dtype dtype) {
    std::vector<uint8_t> elements(2 * levels.size());
    for (size_t i = 0; i < levels.size(); ++i) put(dtype, elements.data() + 2 * i, levels[i]);
    return elements;
  }

  size_t group(int64_t row, int64_t column) const { return row * groups + column / (columns / groups); }
  double at(int64_t row, int64_t column) const { return levels[row * columns + column]; }
};

void check_linear(Dtype dtype, int64_t inputs, const Weights& w, bool gated, bool has_residual = false) {
  const int64_t outputs = gated ? w.rows / 2 : w.rows, columns = w.columns;
  Array x(dtype, inputs * columns, 0), y(dtype, inputs * outputs, 0), bias(dtype, w.rows, 0);
  Array residual(dtype, inputs * outputs, 0);
  for (int64_t i = 0; i < x.count(); ++i) x.set(i, static_cast<float>(i % 9 - 4) / 8 + 0.0625f);
  for (int64_t i = 0; i < bias.count(); ++i) bias.set(i, static_cast<float>(i) - 1.5f);
  for (int64_t i = 0; i < residual.count(); ++i) residual.set(i, static_cast<float>(i % 11) - 4.5f);
  for (Array* array : {&x, &y, &bias, &residual}) array->to_device();
  Numbers<uint8_t> bytes(w.bytes);
  Numbers<float> scales(w.scales), offsets(w.offsets);
  LinearLayer task{};
  task.inputs = inputs, task.columns = columns, task.outputs = outputs, task.groups = w.groups, task.gated = gated;
  task.input = x.data(), task.weight = bytes.data() + w.layout.shift, task.output = y.data(), task.bias = bias.data();
  task.stride = (w.row_bytes() + w.layout.gap) / (w.bits == 16 ? 2 : 1), task.int4 = w.bits == 4;
  task.scales = w.scales.empty() ? nullptr : scales.data();
  task.residual = has_residual ? residual.data() : nullptr;
  task.offsets = w.offsets.empty() ? nullptr : offsets.data();
  task.activation = Activation::Relu;
  compute("linear", task, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "linear");
  y.from_device();
  struct Sum {
    double value, size;
  };
  const auto sum_of = [&](int64_t input, int64_t row) {
    Sum sum{bias[row], std::abs(bias[row])};
    for (int64_t c = 0; c < columns; ++c) {
      const double value = x[input * columns + c];
      sum.value += value * (w.step(row, c) + w.offset(row, c));
      sum.size += std::abs(value) * (std::abs(w.step(row, c)) + std::abs(w.offset(row, c)));
    }
    return sum;
  };
  for (int64_t i = 0; i < y.count(); ++i) {
    const int64_t input = i / outputs, row = i % outputs;
    const Sum first = sum_of(input, row), second = gated ? sum_of(input, outputs + row) : first;
    const double bent = std::max(second.value, 0.0), added = has_residual ? residual[i] : 0;
    const double expected = (gated ? first.value * bent : bent) + added;
    const double size = (gated ? first.size * second.size : first.size) + std::abs(added);
    CHECK(std::abs(y[i] - expected) <= (dtype == Dtype::Float32 ? 0 : 0.5 * y.unit(expected)) + 2e-6 * size,
          "linear %s of %lld int%d: %.9g, expected %.9g", name_of(dtype), static_cast<long long>(columns), w.bits, y[i],
          expected);
  }
  CHECK(y.guards_hold(), "linear");
}

// What follows torch's product.
void check_linear_finish(Dtype dtype, int64_t outputs, bool gated, bool has_residual) {
  constexpr int64_t kInputs = 3;  // as rows of check_rows
  Array residual(dtype, kInputs * outputs, 0);
  fill(residual, 9);
  int64_t next = 0;
  check_rows(
      "linear", dtype, outputs,
      [&](void* sums, void* output) {
        LinearLayer task{};
        task.inputs = kInputs, task.outputs = outputs, task.gated = gated, task.activation = Activation::Silu;
        task.residual = has_residual ? residual.data() : nullptr, task.output = output;
        compute("linear", LinearFinish{task, sums}, dtype);
      },
      [&](std::vector<double>& x) {
        for (int64_t i = 0; i < outputs; ++i) {
          x[i] = gated ? x[i] * activated(Activation::Silu, x[outputs + i]) : activated(Activation::Silu, x[i]);
          if (has_residual) x[i] += residual[next + i];
        }
        next += outputs;
      },
      gated ? 2 : 1);
}

void check_dequantized(Dtype dtype, const Weights& w) {
  Array wide(dtype, w.rows * w.columns, 0);
  wide.to_device();
  Numbers<uint8_t> bytes(w.bytes);
  Numbers<float> scales(w.scales), offsets(w.offsets);
  compute("linear",
          QuantizedRows{bytes.data() + w.layout.shift, scales.data(), w.offsets.empty() ? nullptr : offsets.data(),
                        wide.data(), w.rows, w.columns, w.groups, w.bits == 4},
          dtype);
  wide.from_device();
  for (int64_t i = 0; i < wide.count(); ++i) {
    const double step = w.step(i / w.columns, i % w.columns), expected = step + w.offset(i / w.columns, i % w.columns);
    CHECK(std::abs(wide[i] - expected) <= 0.5 * wide.unit(expected) + 6e-8 * std::abs(step),
          "dequantized %s of %lld int%d: %.9g, expected %.9g", name_of(dtype), static_cast<long long>(w.columns), w.bits,
          wide[i], expected);
  }
  CHECK(wide.guards_hold(), "dequantized");
}

// What tensor cores take, where they are: tiles of 16 rows and 8 inputs, whole and not; a few chunks of 64 bytes, and
// more than a block's warps have at once.
void check_tiles(Dtype dtype) {
  if (dtype == Dtype::Float32) return;
  struct Case {
    int bits;
    int64_t columns, groups;
    bool has_offsets;
  };
  for (const Case& c : {Case{8, 64, 1, false}, {8, 320, 5, false}, {8, 768, 6, false}, {8, 960, 1, false},
                        {4, 128, 1, false}, {4, 640, 5, false}, {4, 640, 5, true}, {4, 768, 2, true},
                        {16, 32, 1, false}, {16, 480, 1, false}}) {
    for (const int64_t inputs : {1, 3, 8, 9, 16, 31, 32}) {
      if (c.bits == 16 && inputs > 9) continue;
      check_linear(dtype, inputs, Weights(17, c.columns, c.groups, c.bits, c.has_offsets, {0, 0}, dtype), false, true);
      check_linear(dtype, inputs, Weights(34, c.columns, c.groups, c.bits, c.has_offsets, {0, 16}, dtype), true, true);
    }
    check_linear(dtype, 18, Weights(33, c.columns, c.groups, c.bits, c.has_offsets, {16, 0}, dtype), false);
    // Rows that are not at addresses for 16 bytes.
    check_linear(dtype, 9, Weights(5, c.columns, c.groups, c.bits, c.has_offsets, {2, 0}, dtype), false);
    check_linear(dtype, 9, Weights(5, c.columns, c.groups, c.bits, c.has_offsets, {0, 2}, dtype), false);
  }
  // As many columns as sixteen warps share, and a little more.
  for (const int bits : {8, 4}) check_linear(dtype, 4, Weights(3, 16 * 1024 + 256, 1, bits, bits == 4, {0, 0}), false);
}

void check_quantized_weights(Dtype dtype) {
  struct Case {
    int bits;
    int64_t columns, groups;
  };
  for (const Case& c : {Case{8, 32, 2}, {8, 256, 2}, {8, 4096, 2}, {8, 34, 2}, {4, 64, 1}, {4, 128, 2}, {4, 384, 3},
                        {4, 1216, 19}, {4, 4096, 32}}) {
    for (const bool has_offsets : {false, true}) {
      if (has_offsets && c.bits == 8) continue;
      for (const Layout layout : {Layout{0, 0}, {1, 0}, {0, 3}, {16, 16}}) {
        for (const int64_t inputs : {1, 3, 5}) {
          check_linear(dtype, inputs, Weights(5, c.columns, c.groups, c.bits, has_offsets, layout), false);
        }
        check_linear(dtype, 2, Weights(10, c.columns, c.groups, c.bits, has_offsets, layout), true);
      }
    }
  }
  for (const int bits : {8, 4}) {
    for (const bool has_offsets : {false, bits == 4}) {
      check_dequantized(dtype, Weights(3, 192, 3, bits, has_offsets, {0, 0}));
      check_dequantized(dtype, Weights(3, 192, 3, bits, has_offsets, {1, 0}));  // where packs would not fit
    }
  }
}

// Keys or values of a cache: elements, or levels with a step for each row.
struct Cache {
  Array elements;
  Numbers<int8_t> levels;
  Numbers<float> steps;
  std::vector<double> held;  // what it stands for

  Cache(Dtype dtype, int64_t rows, int64_t row_size, bool quantized, unsigned seed)
      : elements(dtype, quantized ? 0 : rows * row_size, 0),
        levels(quantized ? some_levels(rows * row_size, seed) : std::vector<int8_t>{}),
        steps(quantized ? some_steps(rows) : std::vector<float>{}) {
    fill(elements, seed);
    read(row_size, quantized);
  }

  void* data(bool quantized) const { return quantized ? static_cast<void*>(levels.data()) : elements.data(); }

  void read(int64_t row_size, bool quantized) {
    held.clear();
    elements.from_device();
    for (int64_t i = 0; i < elements.count(); ++i) held.push_back(elements[i]);
    if (!quantized) return;
    const std::vector<int8_t> all = levels.values("cached_attention_int8");
    const std::vector<float> each = steps.values("cached_attention_int8");
    for (size_t i = 0; i < all.size(); ++i) held.push_back(all[i] * double{each[i / row_size]});
  }

 private:
  static std::vector<int8_t> some_levels(int64_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int8_t> levels(count);
    for (int8_t& level : levels) level = static_cast<int8_t>(static_cast<int>(random() % 255) - 127);
    return levels;
  }
  static std::vector<float> some_steps(int64_t count) {
    std::vector<float> steps(count);
    for (int64_t i = 0; i < count; ++i) steps[i] = static_cast<float>(1 + i % 5) / 256;
    return steps;
  }
};

// What a row becomes in an int8 cache, as float32 rounds it.
std::vector<double> rounded_row(const Array& from, int64_t first, int64_t row_size) {
  float largest = 0;
  std::vector<double> row(row_size);
  for (int64_t i = 0; i < row_size; ++i) {
    const float size = std::abs(static_cast<float>(from[first + i]));
    largest = size > largest ? size : largest;
  }
  for (int64_t i = 0; i < row_size; ++i) {
    const float level = largest == 0 ? 0 : std::nearbyint(static_cast<float>(from[first + i]) * (127 / largest));
    row[i] = (std::isfinite(level) ? level : 0.) * double{largest / 127};
  }
  return row;
}

bool same(double a, double b) { return a == b || (a != a && b != b); }

struct AttentionCase {
  int64_t batch, heads, kv_heads, tokens, past, head_dim, window;
  Mask mask;
  bool alibi, causal;
};

// A task of new tokens and two caches with more room than it needs. Heads lie behind their tokens.
struct AttentionTest {
  AttentionCase c;
  bool quantized;
  int64_t room;
  Array query, key, value, output;
  Cache keys, values;
  Attention task{};

  AttentionTest(Dtype dtype, const AttentionCase& c, bool quantized)
      : c(c),
        quantized(quantized),
        room(c.past + c.tokens + 2),
        query(dtype, c.batch * c.tokens * c.heads * c.head_dim, 0),
        key(dtype, c.batch * c.tokens * c.kv_heads * c.head_dim, 0),
        value(dtype, key.count(), 0),
        output(dtype, query.count(), 0),
        keys(dtype, c.batch * c.kv_heads * room, c.head_dim, quantized, 4),
        values(dtype, c.batch * c.kv_heads * room, c.head_dim, quantized, 5) {
    unsigned seed = 0;
    for (Array* array : {&query, &key, &value, &output}) fill(*array, ++seed);
    const int64_t d = c.head_dim;
    task.batch = c.batch, task.heads = c.heads, task.kv_heads = c.kv_heads, task.tokens = c.tokens, task.past = c.past;
    task.total = c.past + c.tokens, task.head_dim = d, task.scale = 0.125f, task.window = c.window;
    task.causal = c.causal;
    task.query = query.data(), task.key = key.data(), task.value = value.data(), task.output = output.data();
    task.query_strides = {c.tokens * c.heads * d, d, c.heads * d};
    task.key_strides = task.value_strides = {c.tokens * c.kv_heads * d, d, c.kv_heads * d};
    task.key_cache = keys.data(quantized), task.value_cache = values.data(quantized);
    task.key_cache_strides = task.value_cache_strides = {c.kv_heads * room * d, room * d, d};
    if (!quantized) return;
    task.key_scales = keys.steps.data(), task.value_scales = values.steps.data();
    task.key_scales_strides = task.value_scales_strides = {c.kv_heads * room, room, 1};
  }

  // Reads the caches again: new tokens must be in them, and all else as it was.
  void check_appended(const char* op) {
    for (const bool of_keys : {true, false}) {
      Cache& cache = of_keys ? keys : values;
      const Array& added = of_keys ? key : value;
      std::vector<double> expected = cache.held;
      for (int64_t i = 0; i < c.batch * c.kv_heads * c.tokens; ++i) {
        const int64_t token = i % c.tokens, row = i / c.tokens, batch = row / c.kv_heads, head = row % c.kv_heads;
        const int64_t from = ((batch * c.tokens + token) * c.kv_heads + head) * c.head_dim;
        const std::vector<double> levels = rounded_row(added, from, c.head_dim);
        for (int64_t j = 0; j < c.head_dim; ++j) {
          expected[(row * room + c.past + token) * c.head_dim + j] = quantized ? levels[j] : added[from + j];
        }
      }
      cache.read(c.head_dim, quantized);
      CHECK(cache.held.size() == expected.size(), "%s", op);
      for (size_t i = 0; i < expected.size(); ++i) {
        CHECK(same(cache.held[i], expected[i]), "%s: the cache has %.9g, expected %.9g", op, cache.held[i], expected[i]);
      }
      CHECK(cache.elements.guards_hold(), "%s", op);
    }
  }
};

void check_attention(Dtype dtype, const AttentionCase& c, bool quantized) {
  const char* op = quantized ? "cached_attention_int8" : "cached_attention";
  AttentionTest test(dtype, c, quantized);
  Attention& task = test.task;
  const int64_t total = task.total, queries = c.batch * c.heads * c.tokens;
  // A mask for all heads and tokens of a row, or with an addend for each.
  std::vector<uint8_t> allowed(c.batch * total);
  std::vector<float> added(queries * total);
  Array elements(dtype, c.mask == Mask::Element ? queries * total : 0, 0);
  for (size_t i = 0; i < allowed.size(); ++i) allowed[i] = i % 3 != 1;
  for (size_t i = 0; i < added.size(); ++i) added[i] = i % 11 == 5 ? -INFINITY : static_cast<float>(i % 7) / 4 - 0.5f;
  for (int64_t i = 0; i < elements.count(); ++i) elements.set(i, added[i]);
  elements.to_device();
  Numbers<uint8_t> allowed_on_device(allowed);
  Numbers<float> added_on_device(added);
  std::vector<float> slopes(c.heads);
  for (int64_t i = 0; i < c.heads; ++i) slopes[i] = static_cast<float>(i + 1) / 64;
  Numbers<float> slopes_on_device(slopes);
  task.alibi = c.alibi ? slopes_on_device.data() : nullptr;
  task.mask_kind = c.mask;
  task.mask = c.mask == Mask::Bool    ? static_cast<const void*>(allowed_on_device.data())
              : c.mask == Mask::Float ? static_cast<const void*>(added_on_device.data())
                                      : elements.data();
  if (c.mask == Mask::Bool) {
    task.mask_strides[0] = total, task.mask_strides[3] = 1;
  } else {
    const int64_t strides[] = {c.heads * c.tokens * total, c.tokens * total, total, 1};
    std::copy_n(strides, 4, task.mask_strides);
  }
  compute(op, task, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
  test.check_appended(op);
  test.output.from_device();
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t token = q % c.tokens, head = q / c.tokens % c.heads, batch = q / c.tokens / c.heads;
    const int64_t own = c.past + token, at = ((batch * c.tokens + token) * c.heads + head) * c.head_dim;
    const int64_t row = (batch * c.kv_heads + head / (c.heads / c.kv_heads)) * test.room;
    std::vector<double> result(c.head_dim);
    double sum = 0;
    for (int64_t p = 0; p < total; ++p) {
      if ((c.causal && p > own) || (c.window && p <= own - c.window)) continue;
      if (c.mask == Mask::Bool && !allowed[batch * total + p]) continue;
      double score = c.mask == Mask::Float || c.mask == Mask::Element ? added[q * total + p] : 0;
      if (c.alibi) score += double{slopes[head]} * static_cast<double>(p);
      for (int64_t i = 0; i < c.head_dim; ++i) {
        score += 0.125 * test.query[at + i] * test.keys.held[(row + p) * c.head_dim + i];
      }
      const double weight = std::exp(score);
      sum += weight;
      for (int64_t i = 0; i < c.head_dim; ++i) result[i] += weight * test.values.held[(row + p) * c.head_dim + i];
    }
    for (int64_t i = 0; i < c.head_dim; ++i) {
      const double expected = sum == 0 ? 0 : result[i] / sum, got = test.output[at + i];
      CHECK(std::abs(got - expected) <= (dtype == Dtype::Float32 ? 0 : 0.5 * test.output.unit(expected)) + 2e-5,
            "%s %s after %lld: %.9g, expected %.9g", op, name_of(dtype), static_cast<long long>(c.past), got, expected);
    }
  }
  CHECK(test.output.guards_hold(), "%s", op);
}

void check_attention_layers(Dtype dtype) {
  const AttentionCase cases[] = {{1, 2, 1, 1, 0, 64, 0, Mask::None, false, true},
                                 {1, 2, 1, 1, 300, 128, 0, Mask::None, false, true},
                                 {1, 1, 1, 1, 5, 10, 0, Mask::None, false, true},
                                 {2, 4, 2, 3, 70, 40, 0, Mask::Bool, true, true},
                                 {2, 2, 2, 2, 130, 33, 5, Mask::Float, false, true},
                                 {1, 9, 1, 1, 62, 256, 0, Mask::Element, false, true},
                                 {1, 2, 1, 1, 32'767, 8, 0, Mask::None, false, true},  // as many parts as there can be
                                 {1, 3, 3, 4, 61, 1, 1, Mask::Bool, false, true},  // some queries see nothing
                                 {2, 2, 1, 7, 260, 16, 0, Mask::None, true, false},
                                 // heads that tensor cores take: groups, more queries than a tile, what hides positions
                                 {2, 16, 2, 1, 200, 128, 0, Mask::None, false, true},
                                 {1, 8, 1, 5, 77, 64, 0, Mask::None, false, true},
                                 {1, 6, 2, 3, 150, 128, 9, Mask::Bool, true, true},
                                 {2, 3, 3, 2, 1, 64, 0, Mask::Element, false, false},
                                 {1, 24, 1, 1, 65, 64, 0, Mask::Float, false, true}};
  for (const AttentionCase& c : cases) {
    for (const bool quantized : {false, true}) check_attention(dtype, c, quantized);
  }
}

// New rows, one of zeros and one with an infinity.
void check_append(Dtype dtype, int64_t head_dim) {
  const char* op = "cached_attention_int8";
  AttentionTest test(dtype, {2, 3, 3, 9, 4, head_dim, 0, Mask::None, false, true}, true);
  for (int64_t i = 0; i < head_dim; ++i) test.key.set(i, 0.f);
  test.value.set(head_dim, INFINITY);
  for (Array* array : {&test.key, &test.value}) array->to_device();
  compute(op, cuda::AttentionAppend{test.task}, dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
  test.check_appended(op);
}

// What torch's attention adds to the scores of prompts that are padded on the left, and the zeros of those that see
// nothing.
void check_attention_bias(Dtype dtype, int64_t past) {
  constexpr int64_t kBatch = 2, kHeads = 3, kTokens = 9, kHeadDim = 5, kWindow = 6;
  const char* op = "cached_attention";
  Attention task{};
  task.batch = kBatch, task.heads = kHeads, task.kv_heads = 1, task.tokens = kTokens, task.past = past;
  task.total = past + kTokens, task.head_dim = kHeadDim, task.window = kWindow, task.causal = true;
  std::vector<uint8_t> mask(kBatch * task.total, 1);
  std::fill(mask.begin() + task.total, mask.begin() + task.total + past + 4, 0);  // of the second sequence
  Numbers<uint8_t> on_device(mask);
  task.mask_kind = Mask::Bool, task.mask = on_device.data();
  task.mask_strides[0] = task.total, task.mask_strides[3] = 1;
  cuda::AttentionBias bias = cuda::attention_bias(task);
  CHECK(bias.batches == kBatch && bias.heads == 1 && bias.stride % 16 == 0 && bias.stride >= task.total, "%s", op);
  Array added(dtype, kBatch * kTokens * bias.stride, 0), output(dtype, kBatch * kTokens * kHeads * kHeadDim, 0);
  Numbers<float> sees(std::vector<float>(kBatch * kTokens, -1.f));
  for (int64_t i = 0; i < output.count(); ++i) output.set(i, 1.f);
  for (Array* array : {&added, &output}) array->to_device();
  bias.data = added.data(), bias.sees = sees.data(), bias.attention.output = output.data();
  compute(op, bias, dtype);
  compute(op, cuda::AttentionZeros{bias}, dtype);
  const std::vector<float> seen = sees.values(op);
  for (Array* array : {&added, &output}) array->from_device();
  for (int64_t row = 0; row < kBatch * kTokens; ++row) {
    const int64_t own = past + row % kTokens;
    bool any = false;
    for (int64_t p = 0; p < task.total; ++p) {
      const bool allowed = p <= own && p > own - kWindow && mask[row / kTokens * task.total + p];
      any = any || allowed;
      const double found = added[row * bias.stride + p];
      CHECK(allowed ? found == 0 : found < -6e4, "%s %s: bias %g", op, name_of(dtype), found);
    }
    CHECK(seen[row] == (any ? 1.f : 0.f), "%s: query %lld", op, static_cast<long long>(row));
    for (int64_t i = 0; i < kHeads * kHeadDim; ++i) {
      CHECK(output[row * kHeads * kHeadDim + i] == (any ? 1 : 0), "%s: zeros, query %lld", op,
            static_cast<long long>(row));
    }
  }
  CHECK(added.guards_hold() && output.guards_hold(), "%s", op);
}

// A prompt that is padded by the smallest number of its dtype, and minus infinity among it: what may be attended to counts
// alike, and what may not is further below it than scores reach.
void check_attention_bias_of_the_smallest(Dtype dtype) {
  constexpr int64_t kTokens = 9, kPadding = 3, kNever = 1;
  const char* op = "cached_attention";
  const double smallest = dtype == Dtype::Float16    ? -65504
                          : dtype == Dtype::BFloat16 ? -3.3895313892515355e38
                                                     : -3.4028234663852886e38;
  Attention task{};
  task.batch = task.heads = task.kv_heads = 1, task.tokens = task.total = kTokens, task.head_dim = 5, task.causal = true;
  Array mask(dtype, kTokens, 0);
  for (int64_t p = 0; p < kTokens; ++p) mask.set(p, p == kNever ? -INFINITY : p < kPadding ? smallest : 0);
  mask.to_device();
  task.mask_kind = Mask::Element, task.mask = mask.data(), task.mask_strides[3] = 1;
  cuda::AttentionBias bias = cuda::attention_bias(task);
  Array added(dtype, kTokens * bias.stride, 0);
  added.to_device();
  Numbers<float> sees(std::vector<float>(kTokens, -1.f));
  bias.data = added.data(), bias.sees = sees.data();
  compute(op, bias, dtype);
  added.from_device();
  for (int64_t row = 0; row < kTokens; ++row) {
    const double counts = added[row * bias.stride + (row < kPadding ? 0 : row)];
    for (int64_t p = 0; p < kTokens; ++p) {
      const bool allowed = p <= row && p != kNever && (row < kPadding || p >= kPadding);
      const double found = added[row * bias.stride + p];
      CHECK(allowed ? found == counts : found < counts - 3e4, "%s %s: bias %g beside %g", op, name_of(dtype), found, counts);
    }
  }
  for (const float seen : sees.values(op)) CHECK(seen == 1.f, "%s", op);
  CHECK(added.guards_hold(), "%s", op);
}

// ---- attention of the Evoformer ------------------------------------------------------------------------------------

void check_evoformer(Dtype dtype, const EvoformerShape& s, bool has_mask, bool has_pair) {
  const char* op = "evoformer_attn";
  const int64_t count = s.at(s.batch, 0, 0, 0), of_sums = s.sum_at(s.batch, 0, 0, 0);
  const int64_t of_mask = has_mask ? s.batch * s.rows * s.tokens : 0;
  const int64_t of_pair = has_pair ? s.batch * s.heads * s.tokens * s.tokens : 0;
  Array query(dtype, count, 0), key(dtype, count, 0), value(dtype, count, 0), grad(dtype, count, 0);
  Array mask(dtype, of_mask, 0), pair(dtype, of_pair, 0), output(dtype, count, 0);
  Array query_grad(dtype, count, 0), key_grad(dtype, count, 0), value_grad(dtype, count, 0);
  unsigned seed = 0;
  for (Array* array : {&query, &key, &value, &grad, &mask, &pair}) fill(*array, ++seed);
  // A row without keys, and one that lacks some.
  for (int64_t i = 0; i < of_mask; ++i) {
    if (i < s.tokens ? s.rows > 1 : i % s.tokens == 2) mask.set(i, -INFINITY);
  }
  mask.to_device();
  for (Array* array : {&output, &query_grad, &key_grad, &value_grad}) array->to_device();
  Numbers<float> sums(std::vector<float>(of_sums, NAN)), mask_grad(std::vector<float>(of_mask, NAN));
  Numbers<float> pair_grad(std::vector<float>(of_pair, NAN));
  const double scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  const EvoformerInputs in{s, static_cast<float>(scale), query.data(), key.data(), value.data(),
                           has_mask ? mask.data() : nullptr, has_pair ? pair.data() : nullptr};
  compute(op, EvoformerAttention{in, output.data(), sums.data()}, dtype);
  compute(op,
          EvoformerBackward{in, grad.data(), output.data(), sums.data(), query_grad.data(), key_grad.data(),
                            value_grad.data(), has_mask ? mask_grad.data() : nullptr,
                            has_pair ? pair_grad.data() : nullptr},
          dtype);
  CHECK(cudaDeviceSynchronize() == cudaSuccess, "%s", op);
  for (Array* array : {&output, &query_grad, &key_grad, &value_grad}) array->from_device();
  const std::vector<float> logs = sums.values(op), mask_got = mask_grad.values(op), pair_got = pair_grad.values(op);
  std::vector<double> query_want(count), key_want(count), value_want(count), mask_want(of_mask), pair_want(of_pair);
  const auto close = [&](const char* what, double got, double want, double unit, double loss) {
    CHECK(std::abs(got - want) <= unit + loss + 2e-5 * std::abs(want), "%s %s, %s: %.9g, expected %.9g", op,
          name_of(dtype), what, got, want);
  };
  const auto half_unit = [&](double x) { return dtype == Dtype::Float32 ? 0 : 0.5 * output.unit(x); };
  for (int64_t at = 0; at < of_sums; ++at) {  // of [batch, rows, heads, tokens]
    const int64_t i = at % s.tokens, h = at / s.tokens % s.heads, n = at / s.tokens / s.heads % s.rows;
    const int64_t b = at / s.tokens / s.heads / s.rows, from = s.at(b, n, i, h);
    const auto mask_at = [&](int64_t j) { return (b * s.rows + n) * s.tokens + j; };
    const auto pair_at = [&](int64_t j) { return ((b * s.heads + h) * s.tokens + i) * s.tokens + j; };
    std::vector<double> scores(s.tokens), result(s.head_dim);
    double sum = 0, along = 0;
    for (int64_t j = 0; j < s.tokens; ++j) {
      for (int64_t d = 0; d < s.head_dim; ++d) scores[j] += query[from + d] * key[s.at(b, n, j, h) + d] * scale;
      scores[j] += (has_mask ? mask[mask_at(j)] : 0) + (has_pair ? pair[pair_at(j)] : 0);
      sum += std::exp(scores[j]);
    }
    if (sum == 0) {
      CHECK(logs[at] == -INFINITY, "%s: a query without keys has the sum %g", op, logs[at]);
    } else {
      close("logsumexp", logs[at], std::log(sum), 0, 2e-5);
    }
    // The gradients follow from the output and the sums that the forward gave.
    for (int64_t j = 0; j < s.tokens && sum > 0; ++j) {
      for (int64_t d = 0; d < s.head_dim; ++d) result[d] += std::exp(scores[j]) / sum * value[s.at(b, n, j, h) + d];
    }
    for (int64_t d = 0; d < s.head_dim; ++d) {
      close("output", output[from + d], result[d], half_unit(result[d]), 2e-5);
      along += grad[from + d] * output[from + d];
    }
    for (int64_t j = 0; j < s.tokens && sum > 0; ++j) {
      const int64_t to = s.at(b, n, j, h);
      const double p = std::exp(scores[j] - logs[at]);
      double of_weight = 0;
      for (int64_t d = 0; d < s.head_dim; ++d) of_weight += grad[from + d] * value[to + d];
      const double of_score = p * (of_weight - along);
      for (int64_t d = 0; d < s.head_dim; ++d) {
        query_want[from + d] += of_score * key[to + d] * scale;
        key_want[to + d] += of_score * query[from + d] * scale;
        value_want[to + d] += p * grad[from + d];
      }
      if (has_mask) mask_want[mask_at(j)] += of_score;
      if (has_pair) pair_want[pair_at(j)] += of_score;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    close("query's gradient", query_grad[i], query_want[i], half_unit(query_want[i]), 2e-4);
    close("key's gradient", key_grad[i], key_want[i], half_unit(key_want[i]), 2e-4);
    close("value's gradient", value_grad[i], value_want[i], half_unit(value_want[i]), 2e-4);
  }
  for (int64_t i = 0; i < of_mask; ++i) close("mask's gradient", mask_got[i], mask_want[i], 0, 2e-4);
  for (int64_t i = 0; i < of_pair; ++i) close("pair's gradient", pair_got[i], pair_want[i], 0, 2e-4);
  for (const Array* array : {&output, &query_grad, &key_grad, &value_grad}) CHECK(array->guards_hold(), "%s", op);
}

// ---- random layerwise token dropping -------------------------------------------------------------------------------

std::vector<int32_t> some_tokens(int64_t count, int64_t sequence) {
  std::mt19937 random(3);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % sequence);
  return tokens;
}

void check_token_sort(int64_t rows, int64_t reserved, int64_t sequence) {
  const char* op = "token_sort_";
  std::vector<int32_t> expected = some_tokens(rows * reserved, sequence);
  Numbers<int32_t> from(expected), to(std::vector<int32_t>(rows * reserved, -1));
  compute(op, TokenRows{from.data(), to.data(), rows, reserved, sequence}, kAnyDtype);
  for (int64_t row = 0; row < rows; ++row) {
    std::sort(expected.begin() + row * reserved, expected.begin() + (row + 1) * reserved);
  }
  CHECK(to.values(op) == expected, "%s of %lld of %lld", op, static_cast<long long>(reserved),
        static_cast<long long>(sequence));
}

// Tokens of `bytes` bytes, some of them chosen twice: the last wins.
void check_tokens(int64_t bytes, bool batch_first) {
  constexpr int64_t kBatch = 3, kSequence = 11, kReserved = 7;
  std::vector<uint8_t> all(kBatch * kSequence * bytes), chosen(kBatch * kReserved * bytes);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint8_t>(i * 7);
  for (size_t i = 0; i < chosen.size(); ++i) chosen[i] = static_cast<uint8_t>(i * 11 + 1);
  const std::vector<int32_t> tokens = some_tokens(kBatch * kReserved, kSequence);
  const auto at = [&](int64_t sequence, int64_t token, int64_t length) {
    return (batch_first ? sequence * length + token : token * kBatch + sequence) * bytes;
  };
  std::vector<uint8_t> gathered(chosen.size()), scattered = all;
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t i = 0; i < kReserved; ++i) {
      const int64_t there = at(b, tokens[b * kReserved + i], kSequence), here = at(b, i, kReserved);
      std::copy_n(all.begin() + there, bytes, gathered.begin() + here);
      std::copy_n(chosen.begin() + here, bytes, scattered.begin() + there);
    }
  }
  Numbers<uint8_t> from(all), to(std::vector<uint8_t>(chosen.size())), new_ones(chosen);
  Numbers<int32_t> indices(tokens);
  const auto places = [&](uint8_t* data, int64_t length) {
    return Tokens{reinterpret_cast<char*>(data), batch_first ? length * bytes : bytes,
                  batch_first ? bytes : kBatch * bytes};
  };
  TokenMove move{places(from.data(), kSequence), places(to.data(), kReserved), indices.data(), kBatch, kSequence,
                 kReserved, bytes};
  compute("token_gather", TokenGather{move}, kAnyDtype);
  CHECK(to.values("token_gather") == gathered, "token_gather, %lld bytes", static_cast<long long>(bytes));
  move.chosen = places(new_ones.data(), kReserved);
  compute("token_scatter_", TokenScatter{move}, kAnyDtype);
  CHECK(from.values("token_scatter_") == scattered, "token_scatter_, %lld bytes", static_cast<long long>(bytes));
}

template <class Element>
void check_mask(int64_t reserved) {
  constexpr int64_t kLayers = 2, kBatch = 3, kSequence = 37;
  std::vector<Element> mask(kBatch * kSequence * kSequence), expected;
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = static_cast<Element>(i);
  const std::vector<int32_t> tokens = some_tokens(kLayers * kBatch * reserved, kSequence);
  for (int64_t row = 0; row < kLayers * kBatch * reserved; ++row) {
    const int64_t sequence = row / reserved, from = (sequence % kBatch * kSequence + tokens[row]) * kSequence;
    for (int64_t i = 0; i < reserved; ++i) expected.push_back(mask[from + tokens[sequence * reserved + i]]);
  }
  Numbers<Element> from(mask), to(std::vector<Element>(expected.size()));
  Numbers<int32_t> indices(tokens);
  const auto* data = reinterpret_cast<const char*>(from.data());
  const MaskGather work{data, indices.data(), reinterpret_cast<char*>(to.data()), kLayers, kBatch, kSequence, reserved,
                        sizeof(Element)};
  compute("mask_gather_bert", work, kAnyDtype);
  CHECK(to.values("mask_gather_bert") == expected, "mask_gather_bert, elements of %d bytes", int(sizeof(Element)));
}

// ---- errors ----------------------------------------------------------------------------------------------------------

// More rows than a launch takes: the error is of the op that was called, not of another that has the same kernel.
template <class Work>
void check_too_many_rows(const char* op, const Work& work) {
  std::string message;
  try {
    compute(op, work, Dtype::Float32);
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  CHECK(message.find("ds_plugin::" + std::string(op) + ": ") == 0, "%s: '%s'", op, message.c_str());
}

void check_errors() {
  constexpr int64_t kRows = int64_t{1} << 31;
  CrossEntropyRows entropy{};
  entropy.rows = kRows, entropy.columns = 1;
  check_too_many_rows("cross_entropy_", entropy);
  ActivationRows activation{};
  activation.rows = kRows, activation.columns = 1;
  check_too_many_rows("bias_activation_", activation);
  ResidualRows residual{};
  residual.rows = kRows, residual.columns = 1;
  check_too_many_rows("some_residual", residual);
  MixRows mix{};
  mix.rows = kRows, mix.columns = 1;
  check_too_many_rows("some_mix", mix);
  check_too_many_rows("token_sort_", TokenRows{nullptr, nullptr, kRows, 1, 1});
}

}  // namespace

int main(int argc, char**) {
  if (argc > 1) guard_bytes = 0;
  check_errors();
  for (const int64_t reserved : {0, 1, 31, 300, 5000}) {
    check_token_sort(3, reserved, 1);
    check_token_sort(2, reserved, 100);
    check_token_sort(2, reserved, 10'000);  // more than a block counts at once
  }
  for (const int bits : {8, 4}) {
    for (const int64_t size : {2, 8, 62, 264, 2048}) {
      check_swizzle(size, bits);
      for (const bool symmetric : {false, true}) check_reduce(size, bits, symmetric);
    }
    check_reduce(8192, bits, false);
  }
  check_token_sort(3, 40, INT32_MAX);  // nowhere near as many tokens as the sequence has
  for (const int64_t bytes : {0, 1, 6, 12, 64, 262, 8192}) check_tokens(bytes, true), check_tokens(bytes, false);
  for (const int64_t reserved : {0, 1, 20, 300}) {
    check_mask<uint8_t>(reserved), check_mask<uint16_t>(reserved);
    check_mask<uint32_t>(reserved), check_mask<uint64_t>(reserved);
  }
  for (const Dtype dtype : {Dtype::Float32, Dtype::BFloat16, Dtype::Float16}) {
    check_lamb(dtype);
    for (const int64_t columns : {1, 7, 768, 1001}) {
      for (int i = 0; i < kActivations; ++i) {
        for (const bool gated : {false, true}) check_activation(dtype, columns, static_cast<Activation>(i), gated);
      }
      for (const bool scale_attention : {false, true}) check_add_bias(dtype, columns, scale_attention);
      check_mix(dtype, columns);
      for (int i = 0; i < kActivations; ++i) check_gate(dtype, columns, static_cast<Activation>(i));
      for (const bool tanh : {false, true}) check_gelu(dtype, 3, columns, tanh), check_gelu(dtype, 70, columns, tanh);
      for (const int terms : {2, 3, 4}) check_bias_add(dtype, columns, terms);
    }
    for (const bool interleaved : {false, true}) {
      for (const bool in_place : {false, true}) {
        check_rotary(dtype, 128, 128, interleaved, in_place);
        check_rotary(dtype, 80, 32, interleaved, in_place);
        check_rotary(dtype, 10, 6, interleaved, in_place);  // packs would not fit
        check_rotary(dtype, 16, 0, interleaved, in_place);
      }
    }
    for (const int64_t columns : {1, 7, 32, 768, 1000, 1001, 20'000}) {  // the last: more than a block's registers hold
      for (const float softcap : {0.f, 2.f}) check_cross_entropy(dtype, columns, softcap);
      if (dtype == Dtype::Float32) check_far_training_norm(columns);
      check_dropout(dtype, columns);
      for (const float scale : {0.5f, 64.f}) check_masked_softmax(dtype, columns, scale);
      check_softmax_gradient(dtype, columns);
    }
    for (const int64_t columns : {1, 7, 8, 64, 128, 136, 1024, 4096, 5000, 8192, 16'384, 40'000}) {
      for (const int64_t rows : {1, 2, 33, 1000}) {
        if (rows > 2 && rows * columns > 200'000) continue;
        for (const bool centred : {false, true}) {
          for (const bool has_residual : {false, true}) check_norm(dtype, rows, columns, centred, has_residual);
        }
        // 16 bits have no digits for rows far from zero.
        if (dtype == Dtype::Float32 && rows == 2) check_norm(dtype, rows, columns, true, true, 4096.f);
        check_softmax(dtype, rows, columns, rows == 2 ? 64.f : 0.5f);
      }
    }
    for (const int64_t columns : {7, 8, 128, 136, 520, 777, 1032, 4096, 8192, 16'392}) {
      for (const int64_t rows : {0, 1, 3, 35, 600}) {
        if (rows > 3 && rows * columns > 350'000) continue;
        for (const bool rms : {false, true}) {
          for (const bool everything : {false, true}) check_norm_gradient(dtype, rows, columns, rms, everything);
        }
      }
    }
    for (const int64_t keys : {8, 33, 128, 1024}) check_softmax_places(dtype, 2, 3, 5, keys);
    for (const int64_t columns : {5000, 5001, 40'000}) {
      check_growing_cross_entropy(dtype, columns, 0.f);
      check_growing_cross_entropy(dtype, columns, 0.25f);
    }
    // In registers from one pack to a whole block of full threads, and beyond them.
    for (const int64_t size : {2, 8, 62, 64, 264, 1000, 1032, 2048, 8192, 16'384, 16'392, 20'000}) {
      for (const int bits : {8, 4}) check_quantizer(dtype, size, bits, true), check_quantizer(dtype, size, bits, false);
    }
    for (const int64_t size : {2, 8, 62, 264, 1032, 20'000}) {
      for (const int bits : {8, 4}) {
        check_dequantize_range(dtype, size, bits);
        for (const bool symmetric : {false, true}) check_fake_quantize(dtype, size, bits, symmetric);
      }
    }
    for (const FpFormat format : {FpFormat{4, 3}, {5, 2}, {4, 7}, {3, 2}, {2, 1}}) check_fp_quantizer(dtype, format);
    for (const EvoformerShape& shape : {EvoformerShape{1, 2, 5, 1, 4}, {2, 3, 17, 2, 8}, {1, 1, 70, 1, 33},
                                        {1, 2, 9, 2, 64}}) {
      for (const bool has_mask : {false, true}) {
        for (const bool has_pair : {false, true}) check_evoformer(dtype, shape, has_mask, has_pair);
      }
    }
    check_quantized_weights(dtype);
    check_tiles(dtype);
    for (const int64_t outputs : {1, 7, 768, 1001}) {
      for (const bool gated : {false, true}) {
        for (const bool has_residual : {false, true}) check_linear_finish(dtype, outputs, gated, has_residual);
      }
    }
    check_attention_layers(dtype);
    for (const int64_t head_dim : {10, 64, 256}) check_append(dtype, head_dim);
    for (const int64_t past : {0, 5, 300}) check_attention_bias(dtype, past);
    check_attention_bias_of_the_smallest(dtype);
    for (const int64_t rows : {0, 1, 63, 200}) check_column_sums(dtype, rows, 68), check_column_sums(dtype, rows, 777);
  }
  for (const Case& which : cases()) {
    for (const Mix& mix : kMixes) {
      // How many tensors a launch takes does not depend on their dtypes, and a sanitizer takes long for each.
      if (which.numels.size() > 100 && &mix != kMixes) continue;
      check_adam(which, mix, true);
      check_adam(which, mix, false);
      check_adagrad(which, mix);
      check_lion(which, mix);
    }
    check_rollback(which);
  }
  return report();
}
