// Loops of random-LTD and of biases, channels last, at every level.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include <ds_kernels/random_ltd.h>
#include <ds_kernels/spatial.h>

#include "at_levels.h"
#include "elements.h"

using namespace ds_kernels;
using namespace ds_kernels::cpu;

namespace {

bool within(AtLevel compute, const std::vector<int32_t>& indices, int64_t count, int64_t sequence) {
  bool all = true;
  compute(TokenCheck{indices.data(), count, sequence, &all}, kAnyDtype);
  return all;
}

void test_within(AtLevel compute) {
  std::vector<int32_t> indices(37, 5);
  CHECK(within(compute, indices, 37, 6) && !within(compute, indices, 37, 5), "limit");
  indices[36] = -1;
  CHECK(!within(compute, indices, 37, 6) && within(compute, indices, 36, 6), "the last one");
  CHECK(within(compute, {}, 0, 0), "none");
}

void test_sort(AtLevel compute) {
  std::mt19937 random(1);
  for (const int64_t count : {0, 1, 2, 17, 100, 300}) {
    for (const int64_t rows : {1, 3}) {
      std::vector<int32_t> indices(rows * count), sorted(rows * count, -1), expected;
      for (int32_t& index : indices) index = static_cast<int32_t>(random() % 100);
      expected = indices;
      for (int64_t row = 0; row < rows; ++row) {
        std::sort(expected.begin() + row * count, expected.begin() + (row + 1) * count);
      }
      // One share for all rows: the counts of a row must not be left to the next.
      compute(TokenRows{indices.data(), sorted.data(), rows, count, 100}, kAnyDtype, Shares(1));
      CHECK(sorted == expected, "%d rows of %d indices", int(rows), int(count));
    }
  }
}

// Tokens of 3 bytes: two sequences of five, sequence first, of which three each are chosen.
void test_tokens(AtLevel compute) {
  std::vector<char> all(30), chosen(18), back(30);
  for (int i = 0; i < 30; ++i) all[i] = static_cast<char>(i);
  const int32_t indices[] = {0, 2, 4, 1, 2, 3};
  TokenMove move{{all.data(), 3, 6}, {chosen.data(), 3, 6}, indices, 2, 5, 3, 3};
  compute(TokenGather{move}, kAnyDtype, Shares(4));
  const std::vector<char> expected{0, 1, 2, 9, 10, 11, 12, 13, 14, 15, 16, 17, 24, 25, 26, 21, 22, 23};
  CHECK(chosen == expected, "gathered tokens");
  move.all.data = back.data();
  compute(TokenScatter{move}, kAnyDtype);
  for (const int token : {0, 4, 8, 3, 5, 7}) {  // token * 2 + sequence
    CHECK(!std::memcmp(&back[token * 3], &all[token * 3], 3), "token %d did not come back", token);
  }
  for (const int token : {1, 2, 6, 9}) {
    CHECK(back[token * 3] == 0 && back[token * 3 + 2] == 0, "token %d was written", token);
  }
}

// Tokens of many columns, in shares that end within a token and within a sequence; one of them is chosen twice.
void test_wide_tokens(AtLevel compute) {
  constexpr int64_t kBytes = 3 * 512 + 7;
  std::vector<char> chosen(2 * 2 * kBytes), all(2 * 3 * kBytes);
  for (size_t i = 0; i < chosen.size(); ++i) chosen[i] = static_cast<char>(i % 97);
  const int32_t indices[] = {2, 2, 0, 1};
  const TokenMove move{{all.data(), 3 * kBytes, kBytes}, {chosen.data(), 2 * kBytes, kBytes}, indices, 2, 3, 2,
                       kBytes};
  for (const int64_t shares : {1, 4, 5}) {
    std::fill(all.begin(), all.end(), static_cast<char>(99));
    compute(TokenScatter{move}, kAnyDtype, Shares(shares));
    const auto same = [&](int64_t to, int64_t from) {
      return !std::memcmp(&all[to * kBytes], &chosen[from * kBytes], kBytes);
    };
    CHECK(same(2, 1) && same(3, 2) && same(4, 3), "%d shares", int(shares));
    CHECK(all[0] == 99 && all[5 * kBytes] == 99, "%d shares: a token was written that was not chosen", int(shares));
  }
}

template <class Element>
void test_mask(AtLevel compute) {
  std::vector<Element> mask(2 * 16), output(2 * 2 * 4);  // [2, 1, 4, 4] -> [2, 2, 1, 2, 2]
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = static_cast<Element>(i);
  const int32_t indices[] = {0, 3, 1, 2, 2, 3, 0, 1};
  const MaskGather work{reinterpret_cast<char*>(mask.data()), indices, reinterpret_cast<char*>(output.data()),
                        2, 2, 4, 2, sizeof(Element)};
  compute(work, kAnyDtype);
  const int expected[] = {0, 3, 12, 15, 21, 22, 25, 26, 10, 11, 14, 15, 16, 17, 20, 21};
  for (int i = 0; i < 16; ++i) CHECK(output[i] == static_cast<Element>(expected[i]), "%zu bytes: %d", sizeof(Element), i);
}

void test_bias(AtLevel compute) {
  constexpr int64_t kRows = 5;
  for (const Dtype dtype : {Dtype::Float32, Dtype::BFloat16, Dtype::Float16}) {
    for (const int64_t columns : {1, 3, 16, 17, 33}) {
      Elements input(dtype, kRows * columns), other(dtype, kRows * columns), bias(dtype, columns), second(dtype, columns);
      for (int64_t i = 0; i < kRows * columns; ++i) {
        input.set(i, static_cast<float>(i)), other.set(i, static_cast<float>(i % 32) / 16);
      }
      for (int64_t i = 0; i < columns; ++i) {
        bias.set(i, 0.5f * static_cast<float>(i)), second.set(i, -static_cast<float>(i));
      }
      for (const int terms : {1, 2, 3}) {
        Elements output(dtype, kRows * columns, 1);
        BiasRows work{input.data(), bias.data(), terms > 1 ? other.data() : nullptr, terms > 2 ? second.data() : nullptr,
                      output.data(), kRows, columns};
        compute(work, dtype);
        for (int64_t i = 0; i < kRows * columns; ++i) {
          double want = input[i] + bias[i % columns];  // exact in float32
          if (terms > 1) want += other[i];
          if (terms > 2) want += second[i % columns];
          CHECK(std::abs(output[i] - want) <= (dtype == Dtype::Float32 ? 0 : 0.5 * output.unit(want)),
                "%d terms, %d columns: %g, not %g", terms, int(columns), output[i], want);
        }
        CHECK(output.guards_hold(), "wrote beyond the end");
      }
    }
  }
}

}  // namespace

int main() {
  at_all_levels<TokenRows>([](AtLevel compute) {
    test_within(compute);
    test_sort(compute);
    test_tokens(compute);
    test_wide_tokens(compute);
    test_mask<uint8_t>(compute);
    test_mask<uint16_t>(compute);
    test_mask<uint32_t>(compute);
    test_mask<uint64_t>(compute);
  });
  at_all_levels<BiasRows>(test_bias);
  return report();
}
