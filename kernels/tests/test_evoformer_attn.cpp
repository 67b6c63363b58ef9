// Attention of the Evoformer and its gradients, at every level, against the formulas in double.
#include <ds_kernels/evoformer_attn.h>

#include <cmath>
#include <random>
#include <vector>

#include "at_levels.h"
#include "elements.h"

using namespace ds_kernels;
using namespace ds_kernels::cpu;

namespace {

const Dtype kDtypes[] = {Dtype::Float32, Dtype::BFloat16, Dtype::Float16};

Elements random_elements(Dtype dtype, int64_t count, std::mt19937& random) {
  Elements x(dtype, count);
  for (int64_t i = 0; i < count; ++i) x.set(i, static_cast<float>(static_cast<int>(random() % 33) - 16) / 16);
  return x;
}

// All tensors of a call of both ops; a call without biases has them empty.
struct Call {
  Call(const EvoformerShape& s, Dtype dtype, bool mask, bool pair, unsigned seed)
      : shape(s), dtype(dtype), random(seed),
        query(random_elements(dtype, s.at(s.batch, 0, 0, 0), random)),
        key(random_elements(dtype, query.count(), random)),
        value(random_elements(dtype, query.count(), random)),
        grad(random_elements(dtype, query.count(), random)),
        mask_bias(random_elements(dtype, mask ? s.batch * s.rows * s.tokens : 0, random)),
        pair_bias(random_elements(dtype, pair ? s.batch * s.heads * s.tokens * s.tokens : 0, random)),
        output(dtype, query.count()), query_grad(dtype, query.count()), key_grad(dtype, query.count()),
        value_grad(dtype, query.count()), sums(s.sum_at(s.batch, 0, 0, 0)), mask_grad(mask_bias.count(), 7.f),
        pair_grad(pair_bias.count(), 7.f) {}

  EvoformerInputs inputs() {
    return {shape, static_cast<float>(1 / std::sqrt(double(shape.head_dim))), query.data(), key.data(), value.data(),
            mask_bias.count() ? mask_bias.data() : nullptr, pair_bias.count() ? pair_bias.data() : nullptr};
  }

  void run(AtLevel compute) {
    compute(EvoformerAttention{inputs(), output.data(), sums.data()}, dtype, Shares(3));
    compute(EvoformerBackward{inputs(), grad.data(), output.data(), sums.data(), query_grad.data(), key_grad.data(),
                              value_grad.data(), mask_grad.empty() ? nullptr : mask_grad.data(),
                              pair_grad.empty() ? nullptr : pair_grad.data()},
            dtype, Shares(3));
  }

  EvoformerShape shape;
  Dtype dtype;
  std::mt19937 random;
  Elements query, key, value, grad, mask_bias, pair_bias, output, query_grad, key_grad, value_grad;
  std::vector<float> sums, mask_grad, pair_grad;
};

void check_close(const char* what, double got, double want, double unit, double absolute) {
  CHECK(std::abs(got - want) <= 0.51 * unit + absolute + 2e-5 * std::abs(want), "%s: %.9g, not %.9g", what, got, want);
}

// What `run` left, element by element. The gradients follow from the output and the sums that the forward gave.
void check(const Call& c, bool masked) {
  const EvoformerShape& s = c.shape;
  const double scale = 1 / std::sqrt(double(s.head_dim));
  std::vector<double> of_query(c.query.count()), of_key(c.query.count()), of_value(c.query.count()),
      of_mask(c.mask_grad.size()), of_pair(c.pair_grad.size());
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t n = 0; n < s.rows; ++n)
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t i = 0; i < s.tokens; ++i) {
          const int64_t from = s.at(b, n, i, h);
          std::vector<double> scores(s.tokens), output(s.head_dim);
          double sum = 0, along = 0;
          for (int64_t j = 0; j < s.tokens; ++j) {
            for (int64_t d = 0; d < s.head_dim; ++d) scores[j] += c.query[from + d] * c.key[s.at(b, n, j, h) + d] * scale;
            if (c.mask_bias.count()) scores[j] += c.mask_bias[(b * s.rows + n) * s.tokens + j];
            if (c.pair_bias.count()) scores[j] += c.pair_bias[((b * s.heads + h) * s.tokens + i) * s.tokens + j];
            sum += std::exp(scores[j]);
          }
          const double l = std::log(sum), given = c.sums[s.sum_at(b, n, h, i)];
          if (l == -HUGE_VAL) {
            CHECK(masked && given == l, "a query without keys has the sum %g", given);
          } else {
            check_close("logsumexp", given, l, 0, 2e-5);
          }
          for (int64_t j = 0; j < s.tokens && sum > 0; ++j) {
            for (int64_t d = 0; d < s.head_dim; ++d) output[d] += std::exp(scores[j] - l) * c.value[s.at(b, n, j, h) + d];
          }
          for (int64_t d = 0; d < s.head_dim; ++d) {
            check_close("output", c.output[from + d], output[d], c.output.unit(output[d]), 2e-5);
            along += c.grad[from + d] * c.output[from + d];
          }
          for (int64_t j = 0; j < s.tokens && sum > 0; ++j) {
            const int64_t to = s.at(b, n, j, h);
            const double p = std::exp(scores[j] - given);
            double of_weight = 0;
            for (int64_t d = 0; d < s.head_dim; ++d) of_weight += c.grad[from + d] * c.value[to + d];
            const double of_score = p * (of_weight - along);
            for (int64_t d = 0; d < s.head_dim; ++d) {
              of_query[from + d] += of_score * c.key[to + d] * scale;
              of_key[to + d] += of_score * c.query[from + d] * scale;
              of_value[to + d] += p * c.grad[from + d];
            }
            if (!of_mask.empty()) of_mask[(b * s.rows + n) * s.tokens + j] += of_score;
            if (!of_pair.empty()) of_pair[((b * s.heads + h) * s.tokens + i) * s.tokens + j] += of_score;
          }
        }
  for (size_t i = 0; i < of_query.size(); ++i) {
    check_close("query's gradient", c.query_grad[i], of_query[i], c.grad.unit(of_query[i]), 2e-4);
    check_close("key's gradient", c.key_grad[i], of_key[i], c.grad.unit(of_key[i]), 2e-4);
    check_close("value's gradient", c.value_grad[i], of_value[i], c.grad.unit(of_value[i]), 2e-4);
  }
  for (size_t i = 0; i < of_mask.size(); ++i) check_close("mask_bias's gradient", c.mask_grad[i], of_mask[i], 0, 2e-4);
  for (size_t i = 0; i < of_pair.size(); ++i) check_close("pair_bias's gradient", c.pair_grad[i], of_pair[i], 0, 2e-4);
}

void test_formula(AtLevel compute) {
  for (const Dtype dtype : kDtypes) {
    for (const EvoformerShape& shape : {EvoformerShape{1, 2, 5, 1, 4}, {2, 3, 17, 2, 8}, {1, 1, 70, 1, 33}, {1, 1, 9, 2, 80}, {2, 9, 6, 3, 5}}) {
      for (const int biases : {0, 1, 2, 3}) {
        Call call(shape, dtype, biases & 1, biases & 2, 5);
        call.run(compute);
        check(call, false);
      }
    }
  }
}

// Keys that no query may attend to, and a row without any.
void test_masked(AtLevel compute) {
  Call call({1, 2, 20, 2, 16}, Dtype::Float32, true, true, 6);
  for (int key = 0; key < 7; ++key) call.mask_bias.set(key, -INFINITY);
  for (int key = 20; key < 40; ++key) call.mask_bias.set(key, -INFINITY);
  call.run(compute);
  check(call, true);
}

}  // namespace

int main() {
  at_all_levels<EvoformerAttention>([](AtLevel compute) {
    test_formula(compute);
    test_masked(compute);
  });
  return report();
}
