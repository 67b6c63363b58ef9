// What a transformer layer does between its matrix products, row by row. Compiled once per instruction-set level,
// without torch.
//
// A row is read from memory once; what a loop reads again of it lies in the first-level cache then.
#include <ds_kernels/transformer.h>

#include "loops.h"
#include "row.h"

namespace ds_kernels::cpu {
namespace {

template <class Memory>
DS_KERNELS_INLINE void add_to(Memory memory, float* sums, Floats x) {
  memory.store(sums, load_again(memory, sums) + x);
}

// ---- dropout and sum -------------------------------------------------------------------------------------------

template <class Element, bool dropping>
void add_row(const SumRows& s, int64_t row) {
  const Element* input = row_of<Element>(s.input, row, s.columns);
  const Element* bias = one_row<Element>(s.bias);
  const Element* residual = row_of<Element>(s.residual, row, s.columns);
  Element* sum = row_of<Element>(s.sum, row, s.columns);
  for_each_kept_vector<dropping>(s.columns, s.dropout, row, [=](int64_t i, auto memory, auto kept) {
    Floats x = memory.load(input + i);
    if (bias) x += load_again(memory, bias + i);
    x = kept(x);
    if (residual) x += memory.load(residual + i);
    memory.store(sum + i, x);
  });
}

template <class Element>
struct DropoutAdd {
  static void run(const SumRows& rows, int64_t first, int64_t last) {
    const SumRows s = rows;  // a copy, which the compiler knows the stores do not change
    for (int64_t row = first; row < last; ++row) {
      s.dropout.seed ? add_row<Element, true>(s, row) : add_row<Element, false>(s, row);
    }
  }
};

template <class Element, bool dropping>
void drop_gradient(const DropoutGradRows& g, int64_t row, float* sums) {
  const Element* grad_output = row_of<Element>(g.grad_output, row, g.columns);
  Element* grad_input = row_of<Element>(g.grad_input, row, g.columns);
  for_each_kept_vector<dropping>(g.columns, g.dropout, row, [=](int64_t i, auto memory, auto kept) {
    const Floats grad = kept(memory.load(grad_output + i));
    memory.store(grad_input + i, grad);
    if (sums) add_to(memory, sums + i, grad);
  });
}

template <class Element>
struct DropoutAddBackward {
  static void run(const DropoutGradRows& rows, int64_t first, int64_t last, float* sums) {
    const DropoutGradRows g = rows;
    for (int64_t row = first; row < last; ++row) {
      g.dropout.seed ? drop_gradient<Element, true>(g, row, sums) : drop_gradient<Element, false>(g, row, sums);
    }
  }
};

// ---- norms -----------------------------------------------------------------------------------------------------

// Normalises x and stores the row's mean, but for RMS norm, and 1 / sqrt(variance + eps).
template <class Element>
void normalise_row(const TrainingNormRows& n, int64_t row, const Element* x) {
  const int64_t columns = n.sum.columns;
  const float count = static_cast<float>(columns > 0 ? columns : 1);
  // The sum was read or written just now, the input was not.
  const auto first_time = [known = n.sum.sum != nullptr, x](int64_t i, auto memory) {
    return known ? load_again(memory, x + i) : memory.load(x + i);
  };
  float mean = 0, squares = 0;
  if (n.rms) {
    squares = sum_over(columns, [=](int64_t i, auto memory) {
      const Floats value = first_time(i, memory);
      return value * value;
    });
  } else {
    mean = n.mean[row] = sum_over(columns, first_time) / count;
    squares = sum_over(columns, [=](int64_t i, auto memory) {
      const Floats difference = load_again(memory, x + i) - mean;
      return difference * difference;
    });
  }
  const float rstd = n.rstd[row] = 1.f / square_root(squares / count + n.eps);
  const Element* weight = one_row<Element>(n.weight);
  const Element* bias = one_row<Element>(n.bias);
  Element* output = row_of<Element>(n.output, row, columns);
  for_each_vector(columns, [=](int64_t i, auto memory) {
    Floats y = (load_again(memory, x + i) - mean) * rstd * load_again(memory, weight + i);
    if (bias) y += load_again(memory, bias + i);
    memory.store(output + i, y);
  });
}

template <class Element>
struct TrainingNorm {
  static void run(const TrainingNormRows& rows, int64_t first, int64_t last) {
    const TrainingNormRows n = rows;
    for (int64_t row = first; row < last; ++row) {
      if (n.sum.sum) n.sum.dropout.seed ? add_row<Element, true>(n.sum, row) : add_row<Element, false>(n.sum, row);
      normalise_row(n, row, row_of<Element>(n.sum.sum ? n.sum.sum : n.sum.input, row, n.sum.columns));
    }
  }
};

// A row's elements as the norm had them before weight and bias.
template <class Element, bool inverted>
struct Normal {
  const Element *rows, *weight, *bias;
  float mean, rstd;

  template <class Memory>
  DS_KERNELS_INLINE Floats operator()(int64_t i, Memory memory, Floats row) const {
    if constexpr (inverted) {
      return (row - load_again(memory, bias + i)) / load_again(memory, weight + i);
    } else {
      return (row - mean) * rstd;
    }
  }
};

template <class Element, bool inverted, bool dropping>
void norm_gradient(const NormGradRows& g, int64_t row, float* sums) {
  const int64_t columns = g.columns;
  const Element* grad_output = row_of<Element>(g.grad_output, row, columns);
  const Element* grad_sum = row_of<Element>(g.grad_sum, row, columns);
  const Element* rows = row_of<Element>(g.rows_in, row, columns);
  const Element* weight = one_row<Element>(g.weight);
  Element* grad_total = row_of<Element>(g.grad_total, row, columns);
  Element* grad_input = row_of<Element>(g.grad_input, row, columns);
  const Normal<Element, inverted> normal{rows, weight, one_row<Element>(g.bias), inverted || g.rms ? 0.f : g.mean[row],
                                         g.rstd[row]};
  float *weight_sums = sums, *bias_sums = g.bias_sums ? sums + columns : nullptr;
  float* input_sums = g.input_sums ? (bias_sums ? bias_sums : sums) + columns : nullptr;
  Floats total_g{}, total_gn{};
  for_each_vector(columns, [&](int64_t i, auto memory) {
    const Floats grad = memory.load(grad_output + i), n = normal(i, memory, memory.load(rows + i));
    add_to(memory, weight_sums + i, grad * n);
    if (bias_sums) add_to(memory, bias_sums + i, grad);
    // Beyond the row's end the gradient is 0, but an inverted element would be 0 / 0.
    const Floats g_weight = grad * load_again(memory, weight + i);
    total_g += g_weight;
    total_gn += within(memory, g_weight * n, 0.f);
  });
  const float count = static_cast<float>(columns > 0 ? columns : 1), rstd = normal.rstd;
  const float mean_g = g.rms ? 0.f : sum_of(total_g) / count, mean_gn = sum_of(total_gn) / count;
  for_each_kept_vector<dropping>(columns, g.dropout, row, [=](int64_t i, auto memory, auto kept) {
    const Floats g_weight = load_again(memory, grad_output + i) * load_again(memory, weight + i);
    const Floats n = normal(i, memory, load_again(memory, rows + i));
    Floats grad = layer_norm_slope(g_weight, n, mean_g, mean_gn, rstd);
    if (grad_sum) grad += memory.load(grad_sum + i);
    memory.store(grad_total + i, grad);
    if constexpr (dropping) {
      grad = kept(grad);
      memory.store(grad_input + i, grad);
    }
    if (input_sums) add_to(memory, input_sums + i, grad);
  });
}

template <class Element>
struct TrainingNormBackward {
  static void run(const NormGradRows& rows, int64_t first, int64_t last, float* sums) {
    const NormGradRows g = rows;
    const bool dropping = g.dropout.seed;
    const auto one = g.mean || g.rms
                         ? (dropping ? norm_gradient<Element, false, true> : norm_gradient<Element, false, false>)
                         : (dropping ? norm_gradient<Element, true, true> : norm_gradient<Element, true, false>);
    for (int64_t row = first; row < last; ++row) one(g, row, sums);
  }
};

// ---- bias and gelu ---------------------------------------------------------------------------------------------

template <class Element, Activation activation>
void gelu_row(const GeluRows& g, int64_t row) {
  const Element* input = row_of<Element>(g.input, row, g.columns);
  const Element* bias = one_row<Element>(g.bias);
  Element* output = row_of<Element>(g.output, row, g.columns);
  for_each_vector(g.columns, [=](int64_t i, auto memory) {
    Floats x = memory.load(input + i);
    if (bias) x += load_again(memory, bias + i);
    memory.store(output + i, activate<activation>(x));
  });
}

template <class Element>
struct BiasGelu {
  static void run(const GeluRows& rows, int64_t first, int64_t last) {
    const GeluRows g = rows;
    const auto one = g.tanh ? gelu_row<Element, Activation::GeluTanh> : gelu_row<Element, Activation::Gelu>;
    for (int64_t row = first; row < last; ++row) one(g, row);
  }
};

template <class Element, bool tanh>
void gelu_gradient(const GeluGradRows& g, int64_t row, float* sums) {
  const Element* grad_output = row_of<Element>(g.grad_output, row, g.columns);
  const Element* input = row_of<Element>(g.input, row, g.columns);
  const Element* bias = one_row<Element>(g.bias);
  Element* grad_input = row_of<Element>(g.grad_input, row, g.columns);
  for_each_vector(g.columns, [=](int64_t i, auto memory) {
    Floats x = memory.load(input + i);
    if (bias) x += load_again(memory, bias + i);
    const Floats grad = memory.load(grad_output + i) * (tanh ? gelu_tanh_slope(x) : gelu_slope(x)).slope;
    memory.store(grad_input + i, grad);
    if (sums) add_to(memory, sums + i, grad);
  });
}

template <class Element>
struct BiasGeluBackward {
  static void run(const GeluGradRows& rows, int64_t first, int64_t last, float* sums) {
    const GeluGradRows g = rows;
    for (int64_t row = first; row < last; ++row) {
      g.tanh ? gelu_gradient<Element, true>(g, row, sums) : gelu_gradient<Element, false>(g, row, sums);
    }
  }
};

// ---- gates -----------------------------------------------------------------------------------------------------

template <Activation activation>
struct Gate {
  template <class Element>
  struct Loop {
    static void run(const GateRows& rows, int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const auto* gate = row_of<Element>(rows.gate, row, rows.columns);
        const auto* up = row_of<Element>(rows.up, row, rows.columns);
        auto* output = row_of<Element>(rows.output, row, rows.columns);
        for_each_vector(rows.columns, [=](int64_t i, auto memory) {
          memory.store(output + i, activate<activation>(memory.load(gate + i)) * memory.load(up + i));
        });
      }
    }
  };
};

template <Activation activation>
struct GateBackward {
  template <class Element>
  struct Loop {
    static void run(const GateGradRows& rows, int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const auto* grad_output = row_of<Element>(rows.grad_output, row, rows.columns);
        const auto* gate = row_of<Element>(rows.gate, row, rows.columns);
        const auto* up = row_of<Element>(rows.up, row, rows.columns);
        auto* grad_gate = row_of<Element>(rows.grad_gate, row, rows.columns);
        auto* grad_up = row_of<Element>(rows.grad_up, row, rows.columns);
        for_each_vector(rows.columns, [=](int64_t i, auto memory) {
          const Floats grad = memory.load(grad_output + i), x = memory.load(gate + i);
          const auto [value, slope] = slope_of<activation>(x);
          memory.store(grad_gate + i, grad * memory.load(up + i) * slope);
          memory.store(grad_up + i, grad * value);
        });
      }
    }
  };
};

// ---- softmax ---------------------------------------------------------------------------------------------------

// Where the mask's row begins for each row of the scores, one after the other.
class MaskRows {
 public:
  MaskRows(const MaskedSoftmaxRows& s, int64_t row) : s_(s) {
    for (int d = kLeadingDimensions - 1; d >= 0; --d) {
      index_[d] = row % s.sizes[d];
      offset_ += index_[d] * s.mask_strides[d];
      row /= s.sizes[d];
    }
  }

  int64_t offset() const { return offset_; }

  void next() {
    for (int d = kLeadingDimensions - 1; d >= 0; --d) {
      offset_ += s_.mask_strides[d];
      if (++index_[d] < s_.sizes[d]) return;
      offset_ -= s_.sizes[d] * s_.mask_strides[d];
      index_[d] = 0;
    }
  }

 private:
  const MaskedSoftmaxRows& s_;
  int64_t index_[kLeadingDimensions] = {};
  int64_t offset_ = 0;
};

// Leaves e^(score - largest score) in `scratch`, and gives what it is to be multiplied by.
template <class Element>
float exponentials(const MaskedSoftmaxRows& s, int64_t row, const Element* mask, float* scratch) {
  const Element* scores = row_of<Element>(s.scores, row, s.columns);
  const bool one = s.mask_is_one;
  const float scale = s.scale, added = mask && one ? PartVector{1}.load(mask)[0] : 0.f;
  const float top = maximum_over(s.columns, [=](int64_t i, auto memory) {
    Floats x = memory.load(scores + i) * scale + added;
    if (mask && !one) x += memory.load(mask + i);
    memory.store(scratch + i, x);
    return x;
  });
  // Where every score is -inf, all results are 0.
  const float shift = top == -__builtin_inff() ? 0.f : top;
  const float sum = sum_over(s.columns, [=](int64_t i, auto memory) {
    const Floats power = exponential(load_again(memory, scratch + i) - shift);
    memory.store(scratch + i, power);
    return power;
  });
  return sum == 0 ? 0.f : 1.f / sum;
}

template <class Element, bool dropping>
void softmax_row(const MaskedSoftmaxRows& s, int64_t row, float factor, const float* scratch) {
  Element* probs = row_of<Element>(s.probs, row, s.columns);
  Element* output = row_of<Element>(s.output, row, s.columns);
  for_each_kept_vector<dropping>(s.columns, s.dropout, row, [=](int64_t i, auto memory, auto kept) {
    const Floats p = load_again(memory, scratch + i) * factor;
    if constexpr (dropping) memory.store(probs + i, p);
    memory.store(output + i, kept(p));
  });
}

template <class Element>
struct MaskedSoftmaxDropout {
  static void run(const MaskedSoftmaxRows& rows, int64_t first, int64_t last, float* scratch) {
    const MaskedSoftmaxRows s = rows;
    if (first >= last) return;
    MaskRows mask_rows(s, first);
    for (int64_t row = first; row < last; ++row, mask_rows.next()) {
      const Element* mask = s.mask ? static_cast<const Element*>(s.mask) + mask_rows.offset() : nullptr;
      const float factor = exponentials<Element>(s, row, mask, scratch);
      s.dropout.seed ? softmax_row<Element, true>(s, row, factor, scratch)
                     : softmax_row<Element, false>(s, row, factor, scratch);
    }
  }
};

template <class Element, bool dropping>
void softmax_gradient(const SoftmaxGradRows& g, int64_t row, float* scratch) {
  const Element* grad_output = row_of<Element>(g.grad_output, row, g.columns);
  const Element* probs = row_of<Element>(g.probs, row, g.columns);
  Element* grad_scores = row_of<Element>(g.grad_scores, row, g.columns);
  const float scale = g.scale;
  Floats sums{};
  for_each_kept_vector<dropping>(g.columns, g.dropout, row, [&](int64_t i, auto memory, auto kept) {
    const Floats grad = kept(memory.load(grad_output + i));
    memory.store(scratch + i, grad);
    sums += grad * memory.load(probs + i);  // 0 beyond the row's end
  });
  const float sum = sum_of(sums);
  for_each_vector(g.columns, [=](int64_t i, auto memory) {
    const Floats grad = load_again(memory, scratch + i) - sum;
    memory.store(grad_scores + i, load_again(memory, probs + i) * grad * scale);
  });
}

template <class Element>
struct MaskedSoftmaxDropoutBackward {
  static void run(const SoftmaxGradRows& rows, int64_t first, int64_t last, float* scratch) {
    const SoftmaxGradRows g = rows;
    const auto one = g.dropout.seed ? softmax_gradient<Element, true> : softmax_gradient<Element, false>;
    for (int64_t row = first; row < last; ++row) one(g, row, scratch);
  }
};

// ---- sums of columns -------------------------------------------------------------------------------------------

// Stores the sum of `count` rows of `columns` floats, which are `distance` apart.
template <class Element>
struct StoreSum {
  static void run(const float* rows, int64_t count, int64_t distance, int64_t columns, void* to) {
    auto* sums = static_cast<Element*>(to);
    for_each_vector(columns, [=](int64_t i, auto memory) {
      Floats sum{};
      for (int64_t row = 0; row < count; ++row) sum += load_again(memory, rows + row * distance + i);
      memory.store(sums + i, sum);
    });
  }
};

// Where sums of columns go: null where they are not wanted.
template <int most>
struct Totals {
  void* wanted[most];

  int64_t count() const {
    int64_t count = 0;
    for (void* total : wanted) count += total != nullptr;
    return count;
  }
};

// Shares a loop that sums columns, and stores the sums that are wanted; the loop's `sums` has one row of floats for each,
// or is null. Rows are divided into parts whose number depends on the shape alone, so that sums do not depend on the
// number of threads; a part has at most 256 rows, so that they stay exact.
template <class Loop, class Rows, int most>
void share_with_sums(const Threads& threads, Loop loop, const Rows& data, const Totals<most>& totals, Dtype dtype) {
  constexpr int64_t kMostParts = 64, kMostRows = 256;
  const int64_t rows = data.rows, columns = data.columns, arrays = totals.count(), size = arrays * columns;
  if (arrays == 0) {
    return share(threads, rows, grain_of(columns),
                 [&](int64_t first, int64_t last) { loop(data, first, last, nullptr); });
  }
  const int64_t worth = rows / grain_of(columns), shares = worth < kMostParts ? worth : kMostParts;
  const int64_t least = (rows + kMostRows - 1) / kMostRows;
  const int64_t parts = shares > least ? shares : least > 0 ? least : 1;
  auto* const sums = threads.room<float>(parts * size);
  share(threads, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      loop(data, rows * part / parts, rows * (part + 1) / parts, sums + part * size);
    }
  });
  const auto store_sum = by_dtype<StoreSum>(dtype);
  const float* sum = sums;
  for (void* total : totals.wanted) {
    if (!total) continue;
    store_sum(sum, parts, size, columns, total);
    sum += columns;
  }
}

}  // namespace

template <>
void compute(const SumRows& s, Dtype dtype, const Threads& threads) {
  share_rows(threads, by_dtype<DropoutAdd>(dtype), s);
}

template <>
void compute(const DropoutGradRows& g, Dtype dtype, const Threads& threads) {
  share_with_sums(threads, by_dtype<DropoutAddBackward>(dtype), g, Totals<1>{{g.sums}}, dtype);
}

template <>
void compute(const TrainingNormRows& n, Dtype dtype, const Threads& threads) {
  const auto loop = by_dtype<TrainingNorm>(dtype);
  share(threads, n.sum.rows, grain_of(n.sum.columns), [&](int64_t first, int64_t last) { loop(n, first, last); });
}

template <>
void compute(const NormGradRows& g, Dtype dtype, const Threads& threads) {
  share_with_sums(threads, by_dtype<TrainingNormBackward>(dtype), g,
                  Totals<3>{{g.weight_sums, g.bias_sums, g.input_sums}}, dtype);
}

template <>
void compute(const GeluRows& g, Dtype dtype, const Threads& threads) {
  share_rows(threads, by_dtype<BiasGelu>(dtype), g);
}

template <>
void compute(const GeluGradRows& g, Dtype dtype, const Threads& threads) {
  share_with_sums(threads, by_dtype<BiasGeluBackward>(dtype), g, Totals<1>{{g.sums}}, dtype);
}

template <>
void compute(const GateRows& g, Dtype dtype, const Threads& threads) {
  with_activation(g.activation, [&](auto activation) {
    share_rows(threads, by_dtype<Gate<activation>::template Loop>(dtype), g);
  });
}

template <>
void compute(const GateGradRows& g, Dtype dtype, const Threads& threads) {
  with_activation(g.activation, [&](auto activation) {
    share_rows(threads, by_dtype<GateBackward<activation>::template Loop>(dtype), g);
  });
}

template <>
void compute(const MaskedSoftmaxRows& s, Dtype dtype, const Threads& threads) {
  share_rows_with_scratch(threads, by_dtype<MaskedSoftmaxDropout>(dtype), s);
}

template <>
void compute(const SoftmaxGradRows& g, Dtype dtype, const Threads& threads) {
  share_rows_with_scratch(threads, by_dtype<MaskedSoftmaxDropoutBackward>(dtype), g);
}

}  // namespace ds_kernels::cpu
