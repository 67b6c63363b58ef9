// Products of matrices of floats, by AVX-512: tiles of b are laid out in the first cache, and rows of a pass by them
// (linear_tiles.h). Other levels have none: torch's product is as fast there.
#include <ds_kernels/matmul.h>

#include "linear_tiles.h"
#include "loops.h"

namespace ds_kernels::cpu {
#if defined(__AVX512F__)
namespace {

// Rows of a at a time, for which each tile of b is laid out once, and how deep they are: so much of a shall be in the second cache,
// or near it.
constexpr int64_t kRows = 516, kDepth = 512;
static_assert(kRows % kTileInputsInFloats == 0);

// Rows of a, `stride` after each other.
struct Rows {
  const float* data;
  int64_t stride;
};

// Up to kDepth columns of up to kRows rows: where they are, or, if a is transposed, a copy in `room`.
Rows rows_of(const Matrix& a, int64_t first, int64_t rows, int64_t from, int64_t depth, float* room) {
  if (!a.transposed) return {a.data + first * a.stride + from, a.stride};
  for (int64_t k = 0; k < depth; k += kLanes) {
    for (int64_t r = 0; r < rows; r += kLanes) {
      const int64_t count = rows - r < kLanes ? rows - r : kLanes;
      ShortVector columns[kLanes];
      load_columns(a.data + (from + k) * a.stride + first + r, a.stride * 4, depth - k, count * 4, columns);
      for (int64_t i = 0; i < count; ++i) store_bits(room + (r + i) * kDepth + k, columns[i]);
    }
  }
  return {room, kDepth};
}

// Columns [column, column + count) of `depth` rows of b from row `from` on; zeros up to kTileRows columns.
void lay_out_columns(const Matrix& b, int64_t from, int64_t depth, int64_t column, int64_t count, Column* to) {
  if (b.transposed) return lay_out_tile(b.data + column * b.stride + from, b.stride, count, depth, to);
  for (int64_t k = 0; k < depth; ++k) {
    const float* row = b.data + (from + k) * b.stride + column;
    for (int64_t i = 0; i < kTileRows; i += kLanes) {
      const int64_t left = count - i;
      store_half(to[k], i,
                 left >= kLanes ? load(row + i)
                 : left > 0     ? PartVector{left}.load(row + i)
                                : Floats{});
    }
  }
}

// c = beta c + sums, of `rows` rows and of columns [column, column + count).
void finish(const Matmul& m, int64_t first, int64_t rows, int64_t column, int64_t count, float beta, const float* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    float* c = m.c + (first + r) * m.columns + column;
    for_each_vector<PlainVector>(count, [=](int64_t i, auto memory) {
      Floats sum = load(sums + r * kTileRows + i);
      if (beta != 0) sum += beta * memory.load(c + i);
      memory.store(c + i, sum);
    });
  }
}

// Rows [first, first + rows), up to kRows, of tiles [tile, last_tile). `sums` has room for those of a tile, and for the copy.
void multiply_rows(const Matmul& m, int64_t first, int64_t rows, int64_t tile, int64_t last_tile, float* sums) {
  float* room = sums + rows * kTileRows;
  for (int64_t from = 0; from == 0 || from < m.depth; from += kDepth) {
    const int64_t depth = m.depth - from < kDepth ? m.depth - from : kDepth;
    const Rows a = rows_of(m.a, first, rows, from, depth, room);
    for (int64_t t = tile; t < last_tile; ++t) {
      const int64_t column = t * kTileRows, left = m.columns - column, count = left < kTileRows ? left : kTileRows;
      for (int64_t i = 0; i < rows * kTileRows; ++i) sums[i] = 0;
      for (int64_t k = 0; k < depth; k += kTileColumns) {
        const int64_t deep = depth - k < kTileColumns ? depth - k : kTileColumns;
        alignas(64) Column laid_out[kTileColumns];
        lay_out_columns(m.b, from + k, deep, column, count, laid_out);
        for (int64_t r = 0; r < rows;) {
          r += add_tiles<kTileInputsInFloats>(rows - r, laid_out, deep, a.data + r * a.stride + k, a.stride, NoScales{},
                                              sums + r * kTileRows);
        }
      }
      finish(m, first, rows, column, count, from == 0 ? m.beta : 1.f, sums);
    }
  }
}

}  // namespace

template <>
void compute(const Matmul& m, Dtype, const Threads& threads) {
  const int64_t parts = (m.rows + kRows - 1) / kRows, most = parts ? (m.rows + parts - 1) / parts : 0;
  const int64_t rows = (most + kTileInputsInFloats - 1) / kTileInputsInFloats * kTileInputsInFloats;
  const int64_t tiles = (m.columns + kTileRows - 1) / kTileRows;
  const int64_t room = rows * (kTileRows + (m.a.transposed ? kDepth : 0));
  share_with_scratch<float>(threads, parts * tiles, grain_of(rows * kTileRows * m.depth), room,
                            [&](int64_t begin, int64_t end, float* scratch) {
                              for (int64_t next; begin < end; begin = next) {
                                const int64_t part = begin / tiles, first = part * rows, left = m.rows - first;
                                next = end < (part + 1) * tiles ? end : (part + 1) * tiles;
                                multiply_rows(m, first, left < rows ? left : rows, begin % tiles, next - part * tiles, scratch);
                              }
                            });
}
#endif

}  // namespace ds_kernels::cpu
