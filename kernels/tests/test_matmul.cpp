// Products of matrices of floats, at the level that has them, in every layout, around tiles and what is copied at a time.
#include <ds_kernels/matmul.h>

#include <random>
#include <vector>

#include "at_levels.h"
#include "elements.h"

using namespace ds_kernels;
using namespace ds_kernels::cpu;

namespace {

// A matrix of multiples of 1/16, which `gap` elements that are NaN follow in each row, or column.
struct Laid {
  int64_t rows, columns, stride;
  bool transposed;
  Elements memory;

  Laid(int64_t rows, int64_t columns, bool transposed, int64_t gap, unsigned seed)
      : rows(rows),
        columns(columns),
        stride((transposed ? rows : columns) + gap),
        transposed(transposed),
        memory(Dtype::Float32, std::max<int64_t>((transposed ? columns : rows) * stride - gap, 0)) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) memory.set(at(i, j), (static_cast<int>(random() % 97) - 48) / 16.f);
    }
  }

  int64_t at(int64_t i, int64_t j) const { return transposed ? j * stride + i : i * stride + j; }
  double operator()(int64_t i, int64_t j) const { return memory[at(i, j)]; }
  Matrix matrix() { return {static_cast<const float*>(static_cast<const void*>(memory.data())), stride, transposed}; }
};

struct Shape {
  int64_t rows, columns, depth;
};

void test_product(AtLevel compute, Shape s, bool a_transposed, bool b_transposed, float beta, int64_t shares) {
  Laid a(s.rows, s.depth, a_transposed, s.depth % 3, 1), b(s.depth, s.columns, b_transposed, s.depth % 2, 2);
  Elements c(Dtype::Float32, s.rows * s.columns, 1);
  const auto before = [](int64_t i) { return static_cast<float>(i % 11) - 5; };
  for (int64_t i = 0; beta != 0 && i < s.rows * s.columns; ++i) c.set(i, before(i));  // else NaN, which is not read
  compute(Matmul{s.rows, s.columns, s.depth, a.matrix(), b.matrix(), static_cast<float*>(static_cast<void*>(c.data())), beta},
          Dtype::Float32, Shares(shares));
  CHECK(c.guards_hold(), "a product wrote beyond its result");
  for (int64_t i = 0; i < s.rows; ++i) {
    for (int64_t j = 0; j < s.columns; ++j) {
      double expected = beta == 0 ? 0 : beta * double{before(i * s.columns + j)};
      for (int64_t k = 0; k < s.depth; ++k) expected += a(i, k) * b(k, j);
      const double found = c[i * s.columns + j], allowed = 2e-6 * (double(s.depth) + 8);
      CHECK(std::abs(found - expected) <= allowed, "%d x %d, %d deep: [%d, %d] is %.9g, expected %.9g", int(s.rows),
            int(s.columns), int(s.depth), int(i), int(j), found, expected);
    }
  }
}

}  // namespace

int main() {
  if (!best_compute<Matmul>()) {
    std::printf("no level that runs here has products: torch's serve\n");
    return 77;
  }
  at_all_levels<Matmul>([](AtLevel compute) {
    for (const Shape s : {Shape{1, 1, 1}, {1, 31, 17}, {5, 16, 127}, {6, 33, 128}, {7, 65, 129}, {12, 32, 3}, {13, 40, 513},
                          {25, 95, 600}, {515, 17, 5}, {516, 3, 18}, {517, 34, 515}, {1040, 9, 7}}) {
      for (const bool a : {false, true}) {
        for (const bool b : {false, true}) {
          test_product(compute, s, a, b, 0, 1);
          test_product(compute, s, a, b, 1, 3);
          test_product(compute, s, a, b, -0.5, 2);
        }
      }
    }
    test_product(compute, {4, 5, 0}, false, false, 0.5, 1);  // c is multiplied, no more
    test_product(compute, {4, 5, 0}, false, false, 0, 1);
  });
  return report();
}
