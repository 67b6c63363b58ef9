// Loops of random-LTD and of biases, channels last, at every level.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "levels.h"
#include "random_ltd_loops.h"
#include "spatial_loops.h"

namespace ds_kernels::cpu {
DS_KERNELS_CPU_LEVELS(RandomLTDLoops, random_ltd_loops)
DS_KERNELS_CPU_LEVELS(SpatialLoops, spatial_loops)
}  // namespace ds_kernels::cpu

using namespace ds_kernels;
using namespace ds_kernels::cpu;

namespace {

void test_within(const RandomLTDLoops& loops) {
  std::vector<int32_t> indices(37, 5);
  CHECK(loops.within(indices.data(), 37, 6) && !loops.within(indices.data(), 37, 5), "limit");
  indices[36] = -1;
  CHECK(!loops.within(indices.data(), 37, 6) && loops.within(indices.data(), 36, 6), "the last one");
  CHECK(loops.within(nullptr, 0, 0), "none");
}

void test_sort(const RandomLTDLoops& loops) {
  std::mt19937 random(1);
  std::vector<int32_t> seen(100);
  for (const int count : {0, 1, 2, 17, 100, 300}) {
    std::vector<int32_t> indices(count), expected;
    for (int32_t& index : indices) index = static_cast<int32_t>(random() % 100);
    expected = indices;
    std::sort(expected.begin(), expected.end());
    loops.sort(indices.data(), count, seen.data(), 100);
    CHECK(indices == expected, "%d indices", count);
    CHECK(std::count(seen.begin(), seen.end(), 0) == 100, "%d indices: counts were left", count);
  }
}

// Tokens of 3 bytes: two sequences of five, sequence first, of which three each are chosen.
void test_tokens(const RandomLTDLoops& loops) {
  std::vector<char> all(30), chosen(18), back(30);
  for (int i = 0; i < 30; ++i) all[i] = static_cast<char>(i);
  const int32_t indices[] = {0, 2, 4, 1, 2, 3};
  TokenMove move{{all.data(), 3, 6}, {chosen.data(), 3, 6}, indices, 2, 5, 3, 3};
  loops.gather(move, 0, 2);
  loops.gather(move, 2, 6);
  const std::vector<char> expected{0, 1, 2, 9, 10, 11, 12, 13, 14, 15, 16, 17, 24, 25, 26, 21, 22, 23};
  CHECK(chosen == expected, "gathered tokens");
  move.all.data = back.data();
  for (int64_t sequence = 0; sequence < 2; ++sequence) {
    loops.scatter(move, sequence, 0, 1);
    loops.scatter(move, sequence, 1, 3);
  }
  for (const int token : {0, 4, 8, 3, 5, 7}) {  // token * 2 + sequence
    CHECK(!std::memcmp(&back[token * 3], &all[token * 3], 3), "token %d did not come back", token);
  }
  for (const int token : {1, 2, 6, 9}) {
    CHECK(back[token * 3] == 0 && back[token * 3 + 2] == 0, "token %d was written", token);
  }
}

template <class Element>
void test_mask(const RandomLTDLoops& loops) {
  std::vector<Element> mask(2 * 16), output(2 * 2 * 4);  // [2, 1, 4, 4] -> [2, 2, 1, 2, 2]
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = static_cast<Element>(i);
  const int32_t indices[] = {0, 3, 1, 2, 2, 3, 0, 1};
  const MaskGather work{reinterpret_cast<char*>(mask.data()), indices, reinterpret_cast<char*>(output.data()),
                        2, 2, 4, 2, sizeof(Element)};
  loops.mask(sizeof(Element))(work, 0, 5);
  loops.mask(sizeof(Element))(work, 5, 8);
  const int expected[] = {0, 3, 12, 15, 21, 22, 25, 26, 10, 11, 14, 15, 16, 17, 20, 21};
  for (int i = 0; i < 16; ++i) CHECK(output[i] == static_cast<Element>(expected[i]), "%zu bytes: %d", sizeof(Element), i);
}

void test_bias(const SpatialLoops& loops) {
  for (const int64_t columns : {1, 3, 16, 17, 33}) {
    const int64_t rows = 5;
    std::vector<float> input(rows * columns), other(rows * columns), bias(columns), second(columns);
    for (int64_t i = 0; i < rows * columns; ++i) input[i] = static_cast<float>(i), other[i] = static_cast<float>(2 * i);
    for (int64_t i = 0; i < columns; ++i) bias[i] = 0.5f * static_cast<float>(i), second[i] = -static_cast<float>(i);
    for (const int terms : {1, 2, 3}) {
      std::vector<float> output(rows * columns + 1, -7.f);
      BiasRows work{input.data(), bias.data(), terms > 1 ? other.data() : nullptr, terms > 2 ? second.data() : nullptr,
                    output.data(), rows, columns};
      const BiasLoop loop = loops.bias_add(Dtype::Float32);
      loop(work, 0, 2);
      loop(work, 2, rows);
      for (int64_t i = 0; i < rows * columns; ++i) {
        float want = input[i] + bias[i % columns];
        if (terms > 1) want += other[i];
        if (terms > 2) want += second[i % columns];
        CHECK(output[i] == want, "%d terms, %d columns: %g, not %g", terms, int(columns), output[i], want);
      }
      CHECK(output.back() == -7.f, "wrote beyond the end");
    }
  }
}

}  // namespace

int main() {
  int tested = 0;
  for (const auto& [level, table] : all_random_ltd_loops()) {
    if (!table || !runs_here(level)) continue;
    ++tested;
    test_within(*table);
    test_sort(*table);
    test_tokens(*table);
    test_mask<uint8_t>(*table);
    test_mask<uint16_t>(*table);
    test_mask<uint32_t>(*table);
    test_mask<uint64_t>(*table);
    CHECK(!table->mask(3), "elements of three bytes");
  }
  for (const auto& [level, table] : all_spatial_loops()) {
    if (!table || !runs_here(level)) continue;
    ++tested;
    test_bias(*table);
  }
  CHECK(tested > 1, "no level was built that runs here");
  return report();
}
