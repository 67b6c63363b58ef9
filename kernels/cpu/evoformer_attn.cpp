// Loops of the Evoformer's attention: a head's keys and values as floats, and blocks of its queries against all of them.
// Compiled once per instruction-set level, without torch.
#include <ds_kernels/evoformer_attn.h>

#include "loops.h"
#include "row.h"

namespace ds_kernels::cpu {
namespace {

// Queries of a block.
constexpr int64_t kQueries = 48;

// Rows in scratch memory are of whole vectors, two together, whose last lanes are zeros or do not matter.
constexpr int64_t kPadded = 2 * kLanes;
DS_KERNELS_INLINE int64_t padded(int64_t count) { return (count + kPadded - 1) / kPadded * kPadded; }

// A matrix whose elements (i, k) are at `data + i * row + k * column`.
struct Left {
  const float* data;
  int64_t row, column;
};

// c[i][j] += sum over k of left(i, k) b[k][j], for `rows` i in registers and all `n` j, a multiple of kPadded.
template <int rows>
DS_KERNELS_INLINE void multiply_rows(const Left& left, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t n,
                                     int64_t depth) {
  for (int64_t j = 0; j < n; j += kPadded) {
    Floats sums[rows][2];
    DS_KERNELS_UNROLL
    for (int i = 0; i < rows; ++i) {
      sums[i][0] = load(c + i * c_row + j);
      sums[i][1] = load(c + i * c_row + j + kLanes);
    }
    for (int64_t k = 0; k < depth; ++k) {
      const Floats first = load(b + k * b_row + j), second = load(b + k * b_row + j + kLanes);
      DS_KERNELS_UNROLL
      for (int i = 0; i < rows; ++i) {
        const float a = left.data[i * left.row + k * left.column];
        sums[i][0] += a * first;
        sums[i][1] += a * second;
      }
    }
    DS_KERNELS_UNROLL
    for (int i = 0; i < rows; ++i) {
      store(c + i * c_row + j, sums[i][0]);
      store(c + i * c_row + j + kLanes, sums[i][1]);
    }
  }
}

inline void multiply(Left left, int64_t m, int64_t depth, const float* b, int64_t b_row, float* c, int64_t c_row,
                     int64_t n) {
  constexpr int kRows = kLanes == 16 ? 8 : 6;  // with two vectors each: AVX-512 has 32 registers, others 16
  int64_t i = 0;
  for (; i + kRows <= m; i += kRows) {
    multiply_rows<kRows>({left.data + i * left.row, left.row, left.column}, b, b_row, c + i * c_row, c_row, n, depth);
  }
  for (; i < m; ++i) {
    multiply_rows<1>({left.data + i * left.row, left.row, left.column}, b, b_row, c + i * c_row, c_row, n, depth);
  }
}

inline void zero(float* at, int64_t count) { __builtin_memset(at, 0, count * sizeof(float)); }

// Takes arrays of floats one behind the other from a thread's scratch memory.
struct Room {
  float* next;

  float* take(int64_t count) {
    float* at = next;
    next += count;
    return at;
  }
};

void add(float* to, const float* from, int64_t count) {
  for_each_vector(count, [&](int64_t j, auto memory) {
    memory.store(to + j, load_again(memory, to + j) + load_again(memory, from + j));
  });
}

// Sums of `count` arrays of `length` floats one behind the other, in their order, for each of `sums`.
void sum(const Threads& threads, int64_t sums, int64_t count, int64_t length, const float* from, float* to) {
  share(threads, sums, grain_of(count * length), [&](int64_t begin, int64_t end) {
    zero(to + begin * length, (end - begin) * length);
    for (int64_t i = begin * count; i < end * count; ++i) add(to + i / count * length, from + i * length, length);
  });
}

// One head of one row.
struct Head {
  int64_t b, n, h;
};

template <class Element>
struct Evoformer {
  // `count` tokens from `first` on of a head, as floats times `factor`: a row for each.
  static void widen(const EvoformerShape& s, const void* tensor, Head at, int64_t first, int64_t count, float factor,
                    float* to) {
    const int64_t width = padded(s.head_dim);
    for (int64_t t = 0; t < count; ++t) {
      const auto* from = static_cast<const Element*>(tensor) + s.at(at.b, at.n, first + t, at.h);
      float* row = to + t * width;
      for_each_vector(s.head_dim, [&](int64_t i, auto memory) { memory.store(row + i, memory.load(from + i) * factor); });
    }
  }

  // The same of all tokens, a column for each: [head_dim][padded(tokens)].
  static void widen_columns(const EvoformerShape& s, const void* tensor, Head at, float* row, float* to) {
    const int64_t length = padded(s.tokens);
    for (int64_t t = 0; t < s.tokens; ++t) {
      widen(s, tensor, at, t, 1, 1, row);
      for (int64_t i = 0; i < s.head_dim; ++i) to[i * length + t] = row[i];
    }
  }

  static void narrow(const EvoformerShape& s, void* tensor, Head at, int64_t first, int64_t count, float factor,
                     const float* from) {
    const int64_t width = padded(s.head_dim);
    for (int64_t t = 0; t < count; ++t) {
      auto* to = static_cast<Element*>(tensor) + s.at(at.b, at.n, first + t, at.h);
      const float* row = from + t * width;
      for_each_vector(s.head_dim, [&](int64_t i, auto memory) { memory.store(to + i, memory.load(row + i) * factor); });
    }
  }

  // Adds the biases of query `t` to its scores.
  static void add_biases(const EvoformerInputs& in, Head at, int64_t t, float* scores) {
    const EvoformerShape& s = in.shape;
    const auto add = [&](const Element* bias) {
      for_each_vector(s.tokens, [&](int64_t j, auto memory) {
        memory.store(scores + j, memory.load(scores + j) + memory.load(bias + j));
      });
    };
    if (in.mask_bias) add(static_cast<const Element*>(in.mask_bias) + (at.b * s.rows + at.n) * s.tokens);
    if (in.pair_bias) {
      add(static_cast<const Element*>(in.pair_bias) + ((at.b * s.heads + at.h) * s.tokens + t) * s.tokens);
    }
  }

  // Scores of `count` queries from `first` on, with their biases.
  static void score(const EvoformerInputs& in, Head at, int64_t first, int64_t count, const float* queries,
                    const float* key_columns, float* scores) {
    const int64_t length = padded(in.shape.tokens), width = padded(in.shape.head_dim);
    zero(scores, count * length);
    multiply({queries, width, 1}, count, in.shape.head_dim, key_columns, length, scores, length, length);
    for (int64_t i = 0; i < count; ++i) add_biases(in, at, first + i, scores + i * length);
  }

  // ---- forward -----------------------------------------------------------------------------------------------------

  static int64_t forward_room(const EvoformerShape& s) {
    const int64_t length = padded(s.tokens), width = padded(s.head_dim);
    return width + s.head_dim * length + s.tokens * width + kQueries * (2 * width + length);
  }

  static void forward(const EvoformerAttention& work, Head at, float* scratch) {
    const EvoformerShape& s = work.in.shape;
    const int64_t length = padded(s.tokens), width = padded(s.head_dim);
    Room room{scratch};
    float* row = room.take(width);
    float* keys = room.take(s.head_dim * length);
    float* values = room.take(s.tokens * width);
    float* queries = room.take(kQueries * width);
    float* results = room.take(kQueries * width);
    float* scores = room.take(kQueries * length);
    widen_columns(s, work.in.key, at, row, keys);
    widen(s, work.in.value, at, 0, s.tokens, 1, values);
    for (int64_t first = 0; first < s.tokens; first += kQueries) {
      const int64_t count = s.tokens - first < kQueries ? s.tokens - first : kQueries;
      widen(s, work.in.query, at, first, count, work.in.scale, queries);
      score(work.in, at, first, count, queries, keys, scores);
      for (int64_t i = 0; i < count; ++i) {
        work.logsumexp[s.sum_at(at.b, at.n, at.h, first + i)] = weigh(scores + i * length, s.tokens);
      }
      zero(results, count * width);
      multiply({scores, length, 1}, count, s.tokens, values, width, results, width, width);
      narrow(s, work.output, at, first, count, 1, results);
    }
  }

  // Makes weights of scores; gives l.
  static float weigh(float* scores, int64_t count) {
    const float top = maximum_over(count, [&](int64_t j, auto memory) { return load_again(memory, scores + j); });
    bool broken = false;
    for (int64_t j = 0; j < count; ++j) broken |= scores[j] != scores[j];
    if (top == kNoScore && !broken) {
      zero(scores, count);
      return kNoScore;
    }
    const float sum = sum_over(count, [&](int64_t j, auto memory) {
      const Floats weight = exponential(load_again(memory, scores + j) - top);
      memory.store(scores + j, weight);
      return weight;
    });
    const float factor = 1 / sum;  // of an infinite score all weights are NaN
    for_each_vector(count, [&](int64_t j, auto memory) {
      memory.store(scores + j, load_again(memory, scores + j) * factor);
    });
    return top == -kNoScore && !broken ? top : top + __builtin_logf(sum);
  }

  // ---- backward ----------------------------------------------------------------------------------------------------

  // The arrays with which a block of queries is derived.
  struct Block {
    float *row, *key_columns, *value_columns, *queries, *grads, *weights, *of_scores;

    Block(const EvoformerShape& s, Room& room) {
      const int64_t length = padded(s.tokens), width = padded(s.head_dim);
      row = room.take(width);
      key_columns = room.take(s.head_dim * length);
      value_columns = room.take(s.head_dim * length);
      queries = room.take(kQueries * width);
      grads = room.take(kQueries * width);
      weights = room.take(kQueries * length);
      of_scores = room.take(kQueries * length);
    }

    static int64_t size(const EvoformerShape& s) {
      const int64_t length = padded(s.tokens), width = padded(s.head_dim);
      return width + 2 * s.head_dim * length + 2 * kQueries * (width + length);
    }

    void load_head(const EvoformerInputs& in, Head at) const {
      widen_columns(in.shape, in.key, at, row, key_columns);
      widen_columns(in.shape, in.value, at, row, value_columns);
    }
  };

  // The weights of `count` queries from `first` on, and the gradients of their scores.
  static void derive(const EvoformerBackward& work, Head at, int64_t first, int64_t count, const Block& block) {
    const EvoformerShape& s = work.in.shape;
    const int64_t length = padded(s.tokens), width = padded(s.head_dim);
    widen(s, work.in.query, at, first, count, work.in.scale, block.queries);
    widen(s, work.grad, at, first, count, 1, block.grads);
    score(work.in, at, first, count, block.queries, block.key_columns, block.weights);
    zero(block.of_scores, count * length);
    multiply({block.grads, width, 1}, count, s.head_dim, block.value_columns, length, block.of_scores, length, length);
    for (int64_t i = 0; i < count; ++i) {
      const auto* output = static_cast<const Element*>(work.output) + s.at(at.b, at.n, first + i, at.h);
      const float* grad = block.grads + i * width;
      const float along =
          sum_over(s.head_dim, [&](int64_t j, auto memory) { return memory.load(output + j) * memory.load(grad + j); });
      const float sum = work.logsumexp[s.sum_at(at.b, at.n, at.h, first + i)];
      float* weights = block.weights + i * length;
      float* of_scores = block.of_scores + i * length;
      if (sum == kNoScore) {
        zero(weights, s.tokens);
        zero(of_scores, s.tokens);
        continue;
      }
      for_each_vector(s.tokens, [&](int64_t j, auto memory) {
        const Floats weight = exponential(load_again(memory, weights + j) - sum);
        memory.store(weights + j, weight);
        memory.store(of_scores + j, weight * (load_again(memory, of_scores + j) - along));
      });
    }
  }

  static int64_t backward_room(const EvoformerShape& s) {
    return Block::size(s) + 3 * s.tokens * padded(s.head_dim) + kQueries * padded(s.head_dim);
  }

  // The gradients of a head's queries, keys and values; those of its scores are added to `of_mask`, of all tokens, and to
  // `of_pairs`, of all pairs of tokens, which may be null.
  static void backward(const EvoformerBackward& work, Head at, float* of_mask, float* of_pairs, float* scratch) {
    const EvoformerShape& s = work.in.shape;
    const int64_t length = padded(s.tokens), width = padded(s.head_dim);
    Room room{scratch};
    const Block block(s, room);
    float* keys = room.take(s.tokens * width);
    float* of_keys = room.take(s.tokens * width);
    float* of_values = room.take(s.tokens * width);
    float* of_queries = room.take(kQueries * width);
    block.load_head(work.in, at);
    widen(s, work.in.key, at, 0, s.tokens, 1, keys);
    zero(of_keys, s.tokens * width);
    zero(of_values, s.tokens * width);
    for (int64_t first = 0; first < s.tokens; first += kQueries) {
      const int64_t count = s.tokens - first < kQueries ? s.tokens - first : kQueries;
      derive(work, at, first, count, block);
      multiply({block.weights, 1, length}, s.tokens, count, block.grads, width, of_values, width, width);
      multiply({block.of_scores, 1, length}, s.tokens, count, block.queries, width, of_keys, width, width);
      zero(of_queries, count * width);
      multiply({block.of_scores, length, 1}, count, s.tokens, keys, width, of_queries, width, width);
      narrow(s, work.query_grad, at, first, count, work.in.scale, of_queries);
      for (int64_t i = 0; i < count; ++i) {
        if (of_mask) add(of_mask, block.of_scores + i * length, s.tokens);
        if (of_pairs) add(of_pairs + (first + i) * s.tokens, block.of_scores + i * length, s.tokens);
      }
    }
    narrow(s, work.key_grad, at, 0, s.tokens, 1, of_keys);
    narrow(s, work.value_grad, at, 0, s.tokens, 1, of_values);
  }

  // In how many parts the rows of tokens come. A sum over rows is one of each part's sum: their number is not to depend on
  // the threads, and they are to take a quarter of the memory of all scores at most.
  static int64_t parts_of(const EvoformerBackward& work) {
    const EvoformerShape& s = work.in.shape;
    if (!work.pair_grad) return s.rows;
    constexpr int64_t kPieces = 64;
    const int64_t heads = s.batch * s.heads, wanted = (kPieces + heads - 1) / heads, most = s.rows < 8 ? 1 : s.rows / 4;
    return wanted < most ? wanted : most;
  }

};

// Calls `body(Evoformer<Element>{})` for elements of `dtype`.
template <class Body>
void for_evoformer(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::BFloat16: return body(Evoformer<BFloat16>{});
    case Dtype::Float16: return body(Evoformer<Float16>{});
    default: return body(Evoformer<float>{});
  }
}

}  // namespace

template <>
void compute(const EvoformerAttention& work, Dtype dtype, const Threads& threads) {
  const EvoformerShape s = work.in.shape;
  for_evoformer(dtype, [&](auto loops) {
    const int64_t heads = s.batch * s.rows * s.heads;
    const int64_t grain = grain_of(s.tokens * s.tokens * s.head_dim);
    share_with_scratch<float>(threads, heads, grain, loops.forward_room(s), [&](int64_t begin, int64_t end, float* scratch) {
      for (int64_t i = begin; i < end; ++i) {
        loops.forward(work, {i / s.heads / s.rows, i / s.heads % s.rows, i % s.heads}, scratch);
      }
    });
  });
}

template <>
void compute(const EvoformerBackward& work, Dtype dtype, const Threads& threads) {
  const EvoformerShape s = work.in.shape;
  for_evoformer(dtype, [&](auto loops) {
    const int64_t heads = s.batch * s.heads, pairs = s.tokens * s.tokens, parts = loops.parts_of(work);
    float* of_mask = work.mask_grad ? threads.room<float>(s.batch * s.rows * s.heads * s.tokens) : nullptr;
    float* of_pairs = work.pair_grad ? threads.room<float>(parts * heads * pairs) : nullptr;
    share_with_scratch<float>(threads, heads * parts, 1, loops.backward_room(s),
                              [&](int64_t begin, int64_t end, float* scratch) {
                                for (int64_t i = begin; i < end; ++i) {
                                  const int64_t head = i / parts, part = i % parts, b = head / s.heads;
                                  for (int64_t n = part * s.rows / parts; n < (part + 1) * s.rows / parts; ++n) {
                                    const Head at{b, n, head % s.heads};
                                    loops.backward(work, at, of_mask ? of_mask + s.sum_at(b, n, at.h, 0) : nullptr,
                                                   of_pairs ? of_pairs + i * pairs : nullptr, scratch);
                                  }
                                }
                              });
    if (of_mask) sum(threads, s.batch * s.rows, s.heads, s.tokens, of_mask, work.mask_grad);
    if (of_pairs) sum(threads, heads, parts, pairs, of_pairs, work.pair_grad);
  });
}

}  // namespace ds_kernels::cpu
