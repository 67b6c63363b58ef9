// The ops of <ds_kernels/ops/rotary.h> for tensors in host memory.
#include "rotary_loops.h"

#include <ds_kernels/ops/rotary.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(RotaryLoops, rotary_loops)

namespace {

struct Rotary : Host {
  using Host::Host;

  void rotary(const char* op, const Rotation& r, Dtype dtype) const {
    const RotaryLoops& loops = loops_for(op, all_rotary_loops());
    const RotaryLoop loop = (r.interleaved ? loops.interleaved : loops.halves)(dtype);
    const int64_t angles = r.rotary_dim / 2;
    // Heads of a token share its angles, so they come one after the other.
    parallel_for(0, r.batch * r.tokens, row_grain(int64_t{r.heads} * r.head_dim), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const int64_t batch = row / r.tokens, token = row % r.tokens;
        const float* cos = r.cos + batch * r.cos_batch + token * angles;
        const float* sin = r.sin + batch * r.sin_batch + token * angles;
        const auto at = [&](const Heads& heads, int64_t head) {
          return static_cast<char*>(heads.data) +
                 size_of(dtype) * (batch * heads.batch + head * heads.head + token * heads.token);
        };
        for (int64_t head = 0; head < r.heads; ++head) {
          loop(at(r.input, head), at(r.output, head), cos, sin, r.head_dim, r.rotary_dim);
        }
      }
    });
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { RotaryOps<Rotary>::implement(m); }

}  // namespace ds_kernels::cpu
