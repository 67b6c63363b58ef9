// The ops of <ds_kernels/ops/transformer.h> for tensors in host memory.
#include "transformer_loops.h"

#include <algorithm>

#include <ds_kernels/ops/transformer.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(TransformerLoops, transformer_loops)

namespace {

const TransformerLoops& loops(const char* op) { return loops_for(op, all_transformer_loops()); }

template <class Loop, class Rows>
void run(Loop loop, const Rows& data, int64_t rows, int64_t columns) {
  parallel_for(0, rows, row_grain(columns), [&](int64_t first, int64_t last) { loop(data, first, last); });
}

template <class Loop, class Rows>
void run_with_scratch(Loop loop, const Rows& data) {
  parallel_for(0, data.rows, row_grain(data.columns), [&](int64_t first, int64_t last) {
    std::vector<float> scratch(data.columns);
    loop(data, first, last, scratch.data());
  });
}

// Runs a loop that sums columns, and stores the sums that are wanted. Rows are divided into parts whose number depends on
// the shape alone, so that sums do not depend on the number of threads; a part has at most 256 rows, so that they stay
// exact.
template <class Loop, class Rows>
void run_with_sums(const char* op, Loop loop, const Rows& data, std::initializer_list<void*> totals, Dtype dtype) {
  constexpr int64_t kMostParts = 64, kMostRows = 256;
  const int64_t rows = data.rows, columns = data.columns;
  const int64_t arrays = std::count_if(totals.begin(), totals.end(), [](void* total) { return total != nullptr; });
  if (arrays == 0) {
    const auto alone = [loop](const Rows& data, int64_t first, int64_t last) { loop(data, first, last, nullptr); };
    return run(alone, data, rows, columns);
  }
  const int64_t shares = std::min(kMostParts, rows / row_grain(columns));
  const int64_t parts = std::max<int64_t>({1, shares, (rows + kMostRows - 1) / kMostRows});
  const int64_t size = arrays * columns;
  std::vector<float> sums(parts * size);
  parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      loop(data, rows * part / parts, rows * (part + 1) / parts, sums.data() + part * size);
    }
  });
  const auto store_sum = loops(op).store_sum(dtype);
  const float* sum = sums.data();
  for (void* total : totals) {
    if (!total) continue;
    store_sum(sum, parts, size, columns, total);
    sum += columns;
  }
}

struct Transformer : Host {
  using Host::Host;

  void dropout_add(const char* op, const SumRows& s, Dtype dtype) const {
    run(loops(op).dropout_add(dtype), s, s.rows, s.columns);
  }
  void dropout_add_backward(const char* op, const DropoutGradRows& g, Dtype dtype) const {
    run_with_sums(op, loops(op).dropout_add_backward(dtype), g, {g.sums}, dtype);
  }
  void training_norm(const char* op, const TrainingNormRows& n, Dtype dtype) const {
    run(loops(op).norm(dtype), n, n.sum.rows, n.sum.columns);
  }
  void training_norm_backward(const char* op, const NormGradRows& g, Dtype dtype) const {
    run_with_sums(op, loops(op).norm_backward(dtype), g, {g.weight_sums, g.bias_sums, g.input_sums}, dtype);
  }
  void bias_gelu(const char* op, const GeluRows& g, Dtype dtype) const {
    run(loops(op).gelu(dtype), g, g.rows, g.columns);
  }
  void bias_gelu_backward(const char* op, const GeluGradRows& g, Dtype dtype) const {
    run_with_sums(op, loops(op).gelu_backward(dtype), g, {g.sums}, dtype);
  }
  void masked_softmax(const char* op, const MaskedSoftmaxRows& s, Dtype dtype) const {
    run_with_scratch(loops(op).softmax(dtype), s);
  }
  void masked_softmax_backward(const char* op, const SoftmaxGradRows& g, Dtype dtype) const {
    run_with_scratch(loops(op).softmax_backward(dtype), g);
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { TransformerOps<Transformer>::implement(m); }

}  // namespace ds_kernels::cpu
