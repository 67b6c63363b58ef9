// The ops of <ds_kernels/ops/softmax.h> for tensors in host memory.
#include "softmax_loops.h"

#include <ds_kernels/ops/softmax.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(SoftmaxLoops, softmax_loops)

namespace {

struct Softmax : Host {
  using Host::Host;

  void softmax(const char* op, const Scores& s, Dtype dtype) const {
    const SoftmaxLoop loop = loops_for(op, all_softmax_loops()).softmax(dtype, s.float_mask);
    const int64_t width = s.keys * size_of(dtype), added_size = s.float_mask ? size_of(Dtype::Float32) : size_of(dtype);
    parallel_for(0, s.batch * s.heads * s.queries, row_grain(s.keys), [&](int64_t first, int64_t last) {
      std::vector<float> scratch(s.keys);
      for (int64_t row = first; row < last; ++row) {
        const int64_t query = row % s.queries, head = row / s.queries % s.heads, batch = row / s.queries / s.heads;
        const auto at = [&](const Added& added) -> const void* {
          if (!added.data) return nullptr;
          return static_cast<const char*>(added.data) +
                 added_size * (batch * added.batch + head * added.head + query * added.query);
        };
        const int64_t position = s.keys - s.queries + query;
        const int64_t end = s.causal ? std::clamp<int64_t>(position + 1, 0, s.keys) : s.keys;
        const int64_t begin = s.window ? std::clamp<int64_t>(position + 1 - s.window, 0, end) : 0;
        loop({static_cast<const char*>(s.input) + row * width, static_cast<char*>(s.output) + row * width, at(s.mask),
              at(s.alibi), s.keys, begin, end, s.scale},
             scratch.data());
      }
    });
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { SoftmaxOps<Softmax>::implement(m); }

}  // namespace ds_kernels::cpu
