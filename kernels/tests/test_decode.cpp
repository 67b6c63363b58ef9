// The loops of linear layers and of attention over a cache, at every level and dtype, around every vector width and
// block, against their formulas in double. Arrays have exactly the memory of their elements.
#include <random>

#include "activated.h"
#include "amx.h"
#include "at_levels.h"
#include "attention_loops.h"
#include "elements.h"
#include "int4.h"
#include "linear_loops.h"

using namespace ds_kernels;
using namespace ds_kernels::cpu;

namespace {

// Multiples of 1/16 between -2 and 2.
Elements numbers(Dtype dtype, size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Elements result(dtype, count);
  for (size_t i = 0; i < count; ++i) result.set(i, (static_cast<int>(random() % 65) - 32) / 16.f);
  return result;
}

std::vector<int8_t> bytes(size_t count) {
  std::mt19937 random(9);
  std::vector<int8_t> result(count);
  for (auto& each : result) each = static_cast<int8_t>(random() % 255 - 127);
  return result;
}

void close(const char* what, const Elements& actual, size_t i, double expected, double loss) {
  const double allowed = 0.5 * actual.unit(expected) + loss;
  CHECK(std::abs(actual[i] - expected) <= allowed, "%s: element %zu of %zu is %.9g, expected %.9g", what, i,
        actual.count(), actual[i], expected);
}

constexpr Dtype kDtypes[] = {Dtype::Float32, Dtype::BFloat16, Dtype::Float16};

// Calls `test(loops, dtype)`.
template <class Loops, class Test>
void in_all_dtypes_of(Test test) {
  at_all_levels_of<Loops>([&](const Loops& loops, int) {
    for (const Dtype dtype : kDtypes) test(loops, dtype);
  });
}

// Calls `test(compute, dtype)`.
template <class Work, class Test>
void in_all_dtypes(Test test) {
  at_all_levels<Work>([&](AtLevel compute) {
    for (const Dtype dtype : kDtypes) test(compute, dtype);
  });
}

// ---- linear ------------------------------------------------------------------------------------------------------

struct Shape {
  int64_t inputs, columns, outputs, groups;
};

double rounded_to_bfloat16(double x) {
  int exponent;
  const double fraction = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8);
}

// `bits` of a weight: 4, 8, or 0 if weights are of the dtype. A bare layer has neither bias nor residual.
void test_linear(const LinearLoops& loops, Dtype dtype, Shape s, int bits, bool has_offsets, bool gated,
                 Activation activation, bool bare = false) {
  const bool quantized = bits != 0;
  const int64_t rows = gated ? 2 * s.outputs : s.outputs;
  Elements x = numbers(dtype, s.inputs * s.columns, 1), w = numbers(dtype, rows * s.columns, 2);
  Elements bias = numbers(dtype, rows, 3), residual = numbers(dtype, s.inputs * s.outputs, 4);
  Elements output(dtype, s.inputs * s.outputs);
  std::vector<int8_t> q = bytes(rows * s.columns);
  const std::vector<Int4Pair> pairs = bits == 4 ? pairs_of(q) : std::vector<Int4Pair>{};
  std::vector<float> scales(rows * s.groups), wide(s.inputs * s.columns), short_scales(s.inputs * s.groups);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = (1 + i % 5) / 128.f;
  std::vector<float> offsets(rows * s.groups, 0.f), group_sums(s.inputs * s.groups);
  for (size_t i = 0; has_offsets && i < offsets.size(); ++i) offsets[i] = (static_cast<int>(i % 7) - 3) / 32.f;
  std::vector<int16_t> shorts(s.inputs * s.columns);
  std::vector<int32_t> eights(s.inputs * s.groups);
  loops.widen(dtype)(x.data(), wide.data(), s.inputs * s.columns);
  LinearTask task{};
  task.inputs = s.inputs;
  task.columns = task.stride = s.columns;
  task.outputs = s.outputs;
  task.widened = wide.data();
  task.weight = bits == 4 ? pairs.data() : bits == 8 ? static_cast<const void*>(q.data()) : w.data();
  task.int4 = bits == 4;
  if (task.int4) task.stride /= 2;
  task.scales = quantized ? scales.data() : nullptr;
  task.groups = quantized ? s.groups : 1;
  task.bias = bare ? nullptr : bias.data();
  task.residual = bare ? nullptr : residual.data();
  task.output = output.data();
  task.activation = activation;
  task.gated = gated;
  std::vector<uint8_t> bytes_of_inputs(s.inputs * loops.bytes_of_input(task));
  uint8_t* of_inputs = bytes_of_inputs.empty() ? nullptr : bytes_of_inputs.data();
  if (quantized && loops.shorten(task, shorts.data(), short_scales.data(), eights.data(), of_inputs)) {
    for (size_t i = 0; i < shorts.size(); ++i) {
      const double value = shorts[i] * double{short_scales[i / (s.columns / s.groups)]};
      CHECK(value == wide[i], "in 16 bits element %zu is %g, expected %g", i, value, wide[i]);  // few digits are exact
    }
    task.shorts = {shorts.data(), short_scales.data(), eights.data(), of_inputs};
  }
  if (has_offsets) {
    loops.sum_groups(task, group_sums.data());
    task.offsets = offsets.data();
    task.group_sums = group_sums.data();
  }
  bool in_bfloat16 = false;
  const auto weight = [&](size_t at) {
    if (!quantized) return w[at];
    const size_t group = at / (s.columns / s.groups);
    const double value = q[at] * scales[group] + offsets[group];
    return in_bfloat16 ? rounded_to_bfloat16(value) : value;
  };
  std::vector<double> inputs(x.count()), weights(w.count());
  for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = x[i];
  const auto sum = [&](int64_t m, int64_t row) {
    double result = bare ? 0 : bias[row];
    for (int64_t c = 0; c < s.columns; ++c) result += inputs[m * s.columns + c] * weights[row * s.columns + c];
    return result;
  };
  const auto check = [&](const char* what, auto loop) {
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = weight(i);
    loop(task, 0, s.outputs / 2);
    loop(task, s.outputs / 2, s.outputs);
    for (int64_t m = 0; m < s.inputs; ++m) {
      for (int64_t o = 0; o < s.outputs; ++o) {
        const double h = sum(m, o);
        const double y = gated ? h * activated(activation, sum(m, s.outputs + o)) : activated(activation, h);
        close(what, output, m * s.outputs + o, y + (bare ? 0 : residual[m * s.outputs + o]),
              2e-6 * (s.columns + std::abs(y)));
        output.set(m * s.outputs + o, -1);
      }
    }
  };
  if (s.inputs <= kMostTileInputs) check("linear", loops.linear(dtype, quantized, task.int4));
  if (dtype != Dtype::BFloat16 || !has_amx() || !loops.has_amx(task)) return;
  const int64_t blocks = amx_blocks(s.inputs);
  std::vector<uint16_t> in_pairs(blocks * kAmxInputs * s.columns, 0x7fc0);
  task.input = x.data();
  task.pairs = in_pairs.data();
  loops.pair_inputs(task, 0, blocks / 2, in_pairs.data());
  loops.pair_inputs(task, blocks / 2, blocks, in_pairs.data());
  in_bfloat16 = true;
  std::vector<float> room(amx_room(s.inputs, gated), NAN);
  const AmxLoop by_amx = loops.by_amx(quantized, task.int4);
  ++runs["linear by AMX"];
  check("linear by AMX", [&](const LinearTask& all, int64_t begin, int64_t end) { by_amx(all, begin, end, room.data()); });
}

void test_linear_layers() {
  in_all_dtypes_of<LinearLoops>([](const LinearLoops& loops, Dtype dtype) {
    for (const Shape s : {Shape{1, 1, 1, 1}, {1, 64, 8, 2}, {1, 65, 9, 5}, {1, 64, 261, 2}, {2, 96, 17, 3}, {3, 33, 66, 3},
                          {5, 128, 5, 1}, {9, 40, 130, 4}, {4, 192, 16, 3}, {1, 256, 19, 2},
                          {1, 1216, 21, 19}, {2, 1216, 11, 19}, {1, 960, 13, 5}, {3, 384, 9, 2},
                          // Inputs of each tile, as many as there may be; columns that fill a tile's and a part of one.
                          {11, 33, 35, 1}, {26, 130, 33, 1}, {27, 64, 34, 1}, {28, 72, 17, 3}, {29, 160, 37, 1},
                          {31, 128, 33, 1}, {35, 192, 66, 1},
                          {128, 384, 34, 2},
                          // Columns that AMX lays out more than once, groups of all of a part, of more and of less.
                          {40, 1088, 37, 17}, {33, 1152, 34, 12}, {50, 1152, 33, 2},
                          // More inputs than for tiles; outputs of which AMX has several blocks at once, and some of a last one.
                          {161, 320, 530, 5}}) {
      for (const int bits : {0, 4, 8}) {
        if (bits == 4 && s.columns / s.groups % kInt4Block != 0) continue;
        test_linear(loops, dtype, s, bits, false, false, Activation::Identity);
        test_linear(loops, dtype, s, bits, false, true, Activation::Silu);
        test_linear(loops, dtype, s, bits, false, false, Activation::Relu);
        if (s.inputs * s.outputs < 1000) {  // a small one of each kind will do
          test_linear(loops, dtype, s, bits, false, false, Activation::Gelu, true);
          test_linear(loops, dtype, s, bits, false, true, Activation::GeluTanh, true);
        }
        if (bits != 4) continue;
        test_linear(loops, dtype, s, bits, true, false, Activation::Identity);
        test_linear(loops, dtype, s, bits, true, true, Activation::Silu);
      }
    }
  });
}

// The largest products that there may be, all of one sign: no sum of some of them overflows.
void test_largest_products() {
  at_all_levels_of<LinearLoops>([](const LinearLoops& loops, int) {
    for (const int64_t columns : {64, 128, 192, 1024}) {
      for (const int64_t inputs : {1, 2, 16}) {
        for (const int sign : {1, -1}) {
          const std::vector<float> x(inputs * columns, sign * 32767.f), scales{1.f, 1.f};
          const std::vector<uint8_t> weights(columns, 0xff);  // 7, each, of two rows
          std::vector<float> short_scales(inputs), output(2 * inputs);
          std::vector<int16_t> shorts(inputs * columns);
          std::vector<int32_t> eights(inputs);
          LinearTask task{};
          task.inputs = inputs;
          task.columns = columns;
          task.stride = columns / 2;
          task.outputs = 2;
          task.widened = x.data();
          task.weight = weights.data();
          task.int4 = true;
          task.scales = scales.data();
          task.groups = 1;
          task.output = output.data();
          std::vector<uint8_t> room(inputs * loops.bytes_of_input(task));
          uint8_t* bytes = room.empty() ? nullptr : room.data();
          if (loops.shorten(task, shorts.data(), short_scales.data(), eights.data(), bytes)) {
            CHECK(std::abs(shorts[0]) == 32767, "the largest is %d", shorts[0]);
            task.shorts = {shorts.data(), short_scales.data(), eights.data(), bytes};
          }
          loops.linear(Dtype::Float32, true, true)(task, 0, 2);
          const double expected = sign * 7. * 32767 * columns;
          for (const float each : output) {
            CHECK(std::abs(each - expected) <= 1e-5 * std::abs(expected), "is %.9g, expected %.9g", each, expected);
          }
        }
      }
    }
  });
}

void test_dequantizing() {
  in_all_dtypes<QuantizedRows>([](AtLevel compute, Dtype dtype) {
    for (const Shape s : {Shape{0, 1, 1, 1}, {0, 33, 5, 3}, {0, 96, 3, 3}, {0, 128, 4, 1}, {0, 256, 2, 2}}) {
      for (const bool int4 : {false, true}) {
        if (int4 && s.columns / s.groups % kInt4Block != 0) continue;
        std::vector<int8_t> weight = bytes(s.outputs * s.columns);
        const std::vector<Int4Pair> pairs = int4 ? pairs_of(weight) : std::vector<Int4Pair>{};
        const void* from = int4 ? static_cast<const void*>(pairs.data()) : weight.data();
        std::vector<float> scales(s.outputs * s.groups), offsets(scales.size());
        for (size_t i = 0; i < scales.size(); ++i) scales[i] = (1 + i % 7) / 300.f, offsets[i] = (i % 5) / 70.f;
        const int64_t width = s.columns / s.groups;
        for (const bool has_offsets : {false, true}) {
          if (has_offsets && !int4) continue;
          Elements wide(dtype, weight.size());
          compute(QuantizedRows{from, scales.data(), has_offsets ? offsets.data() : nullptr, wide.data(), s.outputs,
                                s.columns, s.groups, int4},
                  dtype);
          for (size_t i = 0; i < weight.size(); ++i) {
            const double product = static_cast<double>(weight[i]) * scales[i / width];
            const double exact = product + (has_offsets ? offsets[i / width] : 0);
            // The roundings of product and sum to a float.
            close("dequantized", wide, i, exact, (std::abs(product) + std::abs(exact)) * 6e-8);
          }
        }
      }
    }
  });
}

void test_finishing() {
  in_all_dtypes<LinearFinish>([](AtLevel compute, Dtype dtype) {
    constexpr int64_t kInputs = 3, kOutputs = 37;
    Elements sums = numbers(dtype, kInputs * 2 * kOutputs, 5), residual = numbers(dtype, kInputs * kOutputs, 6);
    Elements output(dtype, kInputs * kOutputs);
    LinearLayer layer{};
    layer.inputs = kInputs;
    layer.outputs = kOutputs;
    layer.output = output.data();
    for (int variant = 0; variant < 4 * kActivations; ++variant) {
      const bool gated = variant & 1, bare = variant & 2;
      layer.gated = gated;
      layer.residual = bare ? nullptr : residual.data();
      layer.activation = static_cast<Activation>(variant / 4);
      compute(LinearFinish{layer, sums.data()}, dtype);
      for (int64_t i = 0; i < kInputs * kOutputs; ++i) {
        const int64_t m = i / kOutputs, o = i % kOutputs;
        const double first = sums[gated ? m * 2 * kOutputs + o : i];
        const double y = gated ? first * activated(layer.activation, sums[m * 2 * kOutputs + kOutputs + o])
                               : activated(layer.activation, first);
        close("finished", output, i, y + (bare ? 0 : residual[i]), 2e-6 * (1 + std::abs(y)));
      }
    }
  });
}

void test_shortening() {
  at_all_levels_of<LinearLoops>([](const LinearLoops& loops, int) {
    std::vector<float> x(128, 0.f);
    std::vector<int16_t> shorts(128);
    float scales[2];
    int32_t eights[2];
    LinearTask task{};
    task.inputs = 1;
    task.columns = 128;
    task.groups = 2;
    task.widened = x.data();
    for (const float top : {0.f, 1e-45f, 1.1754944e-38f, 0.99f, 1.f, 3.4028235e38f}) {
      x[3] = -top;
      const bool done = loops.shorten(task, shorts.data(), scales, eights, nullptr);
      if (!done && top == 0) return;  // not on this CPU
      CHECK(done, "%g was not put into 16 bits", top);
      const double error = std::abs(shorts[3] * double{scales[0]} + top);
      // The smallest may become 0: scales are not subnormal.
      CHECK(error <= (top < 1e-30f ? double{top} : top / 32768.0), "%g is off by %g", top, error);
      CHECK(shorts[100] == 0 && std::isfinite(scales[1]), "a group of zeros has scale %g", scales[1]);
    }
    for (const float broken : {HUGE_VALF, NAN}) {
      x[3] = broken;
      CHECK(!loops.shorten(task, shorts.data(), scales, eights, nullptr), "%g was put into 16 bits", broken);
    }
  });
}

// ---- attention ---------------------------------------------------------------------------------------------------

struct Heads {
  int64_t batch, heads, kv_heads, tokens, past, head_dim, part, window;
  Mask mask;
  bool alibi, causal;
  float scale = 0.25f;
};

// Keys or values of `rows` rows, in elements or, with scales, in bytes.
struct Cache {
  Elements elements;
  std::vector<int8_t> levels;
  std::vector<float> scales;

  Cache(Dtype dtype, int64_t rows, int64_t row_size, bool quantized, unsigned seed)
      : elements(numbers(dtype, rows * row_size, seed)),
        levels(quantized ? bytes(rows * row_size) : std::vector<int8_t>{}),
        scales(quantized ? rows : 0, 1 / 64.f) {}

  void* data() { return levels.empty() ? elements.data() : levels.data(); }
  double at(size_t row, size_t i, size_t row_size) const {
    const size_t place = row * row_size + i;
    return levels.empty() ? elements[place] : static_cast<double>(levels[place]) * scales[row];
  }

  // Whether a row has been appended, rounded as float32 does it.
  bool has(size_t row, const Elements& from, size_t first, size_t row_size) const {
    float largest = 0;
    for (size_t i = 0; i < row_size; ++i) largest = std::max(largest, std::abs(static_cast<float>(from[first + i])));
    const size_t place = row * row_size;
    bool same = levels.empty() || scales[row] == largest / 127;
    for (size_t i = 0; i < row_size; ++i) {
      const float x = static_cast<float>(from[first + i]);
      const float level = largest == 0 ? 0 : std::nearbyint(x * (127 / largest));
      same &= levels.empty() ? elements[place + i] == x : static_cast<float>(levels[place + i]) == level;
    }
    return same;
  }
};

void test_attention(const AttentionLoops& loops, Dtype dtype, Heads h, bool quantized) {
  const int64_t total = h.past + h.tokens, d = h.head_dim, group = h.heads / h.kv_heads;
  Elements query = numbers(dtype, h.batch * h.tokens * h.heads * d, 1);
  Elements key = numbers(dtype, h.batch * h.tokens * h.kv_heads * d, 2);
  Elements value = numbers(dtype, h.batch * h.tokens * h.kv_heads * d, 3);
  Cache keys(dtype, h.batch * h.kv_heads * total, d, quantized, 4);
  Cache values(dtype, h.batch * h.kv_heads * total, d, quantized, 5);
  Elements output(dtype, query.count());
  // A mask for all heads and tokens of a row, or with an addend for each.
  std::vector<uint8_t> mask(h.batch * total);
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = i % 3 != 1;
  const size_t scores = h.batch * h.heads * h.tokens * total;
  Elements added(h.mask == Mask::Element ? dtype : Dtype::Float32, scores);
  for (size_t i = 0; i < scores; ++i) added.set(i, i % 11 == 5 ? -INFINITY : static_cast<float>(i % 7) / 4 - 0.5f);
  std::vector<float> slopes(h.heads);
  for (int64_t i = 0; i < h.heads; ++i) slopes[i] = static_cast<float>(i + 1) / 64;
  AttentionTask task{};
  task.batch = h.batch;
  task.heads = h.heads;
  task.kv_heads = h.kv_heads;
  task.tokens = h.tokens;
  task.past = h.past;
  task.total = total;
  task.head_dim = d;
  task.query = query.data();
  task.key = key.data();
  task.value = value.data();
  task.query_strides = {h.tokens * h.heads * d, d, h.heads * d};
  task.key_strides = task.value_strides = {h.tokens * h.kv_heads * d, d, h.kv_heads * d};
  task.key_cache = keys.data();
  task.value_cache = values.data();
  task.key_cache_strides = task.value_cache_strides = {h.kv_heads * total * d, total * d, d};
  task.key_scales = quantized ? keys.scales.data() : nullptr;
  task.value_scales = quantized ? values.scales.data() : nullptr;
  task.key_scales_strides = task.value_scales_strides = {h.kv_heads * total, total, 1};
  task.output = output.data();
  task.scale = h.scale;
  task.mask_kind = h.mask;
  task.mask = h.mask == Mask::Bool ? static_cast<void*>(mask.data()) : added.data();
  const int64_t of_all[] = {total, 0, 0, 1}, of_each[] = {h.heads * h.tokens * total, h.tokens * total, total, 1};
  std::copy_n(h.mask == Mask::Bool ? of_all : of_each, 4, task.mask_strides);
  task.alibi = h.alibi ? slopes.data() : nullptr;
  task.window = h.window;
  task.causal = h.causal;
  task.part = h.part;
  task.parts = (total + h.part - 1) / h.part;
  std::vector<float> partial(task.items() * task.partial_size());
  task.partial = partial.data();
  loops.attend(dtype, task, 0, task.items());
  loops.finish(dtype, task, 0, h.batch * h.kv_heads);
  for (int64_t b = 0; b < h.batch; ++b) {
    for (int64_t head = 0; head < h.heads; ++head) {
      const size_t row = (b * h.kv_heads + head / group) * total;
      for (int64_t t = 0; t < h.tokens; ++t) {
        const size_t q = ((b * h.tokens + t) * h.heads + head) * d;
        const size_t k = ((b * h.tokens + t) * h.kv_heads + head / group) * d;
        std::vector<double> result(d), weights(total);
        double sum = 0;
        for (int64_t p = 0; p < total; ++p) {
          const int64_t own = h.past + t;
          if ((h.causal && p > own) || (h.window && p <= own - h.window)) continue;
          if (h.mask == Mask::Bool && !mask[b * total + p]) continue;
          const bool adds = h.mask == Mask::Float || h.mask == Mask::Element;
          double score = adds ? added[((b * h.heads + head) * h.tokens + t) * total + p] : 0;
          if (h.alibi) score += slopes[head] * static_cast<double>(p);
          for (int64_t i = 0; i < d; ++i) score += query[q + i] * keys.at(row + p, i, d) * h.scale;
          sum += weights[p] = std::exp(score);
          for (int64_t i = 0; i < d; ++i) result[i] += weights[p] * values.at(row + p, i, d);
        }
        CHECK(keys.has(row + h.past + t, key, k, d), "key %zu was not appended", k);
        CHECK(values.has(row + h.past + t, value, k, d), "value %zu was not appended", k);
        for (int64_t i = 0; i < d; ++i) {
          close("attention", output, q + i, sum == 0 ? 0 : result[i] / sum, 8e-5 * std::max(h.scale, 0.25f));
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_linear_layers();
  test_largest_products();
  test_shortening();
  test_dequantizing();
  test_finishing();
  in_all_dtypes_of<AttentionLoops>([](const AttentionLoops& loops, Dtype dtype) {
    for (const Heads& h : {Heads{1, 1, 1, 1, 0, 1, 512, 0, Mask::Bool, false, true},
                          {2, 4, 2, 1, 7, 16, 512, 0, Mask::Bool, false, true},
                          {1, 2, 2, 3, 130, 33, 512, 0, Mask::Bool, false, true},
                          {1, 4, 1, 2, 300, 64, 128, 0, Mask::Bool, true, true},
                          {2, 2, 1, 1, 260, 80, 100, 5, Mask::Bool, false, true},
                          {1, 2, 1, 1, 30, 64, 512, 0, Mask::None, false, true},
                          {2, 2, 2, 2, 130, 33, 100, 5, Mask::Float, false, true},
                          {1, 9, 1, 1, 62, 24, 512, 0, Mask::Element, false, true},
                          {2, 2, 1, 7, 140, 16, 100, 0, Mask::None, true, false},
                          // Prompts: none was before them.
                          {2, 4, 2, 9, 0, 16, 512, 0, Mask::Float, true, true},
                          {1, 3, 3, 133, 0, 8, 512, 7, Mask::None, false, true},
                          {2, 3, 3, 6, 0, 64, 512, 0, Mask::Element, true, false},
                          // Where no maximum is taken away, weights are infinite.
                          {1, 2, 2, 2, 300, 16, 128, 0, Mask::None, false, true, 16}}) {
      for (const bool quantized : {false, true}) test_attention(loops, dtype, h, quantized);
    }
  });
#if defined(DS_KERNELS_EMULATED_AMX)
  CHECK(runs["linear by AMX"] > 0 || !runs_here(Level::avx512), "no layer was computed by AMX");
#endif
  return report();
}
