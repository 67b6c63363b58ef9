// The ops of <ds_kernels/ops/norm.h> for tensors in host memory.
#include "norm_loops.h"

#include <ds_kernels/ops/norm.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(NormLoops, norm_loops)

namespace {

struct Norms : Host {
  using Host::Host;

  void layer_norm(const char* op, const NormRows& rows, Dtype dtype) const {
    run(loops_for(op, all_norm_loops()).layer_norm(dtype), rows);
  }
  void rms_norm(const char* op, const NormRows& rows, Dtype dtype) const {
    run(loops_for(op, all_norm_loops()).rms_norm(dtype), rows);
  }

  static void run(NormLoop loop, const NormRows& rows) {
    parallel_for(0, rows.rows, row_grain(rows.columns), [&](int64_t first, int64_t last) {
      std::vector<float> scratch(rows.columns);
      loop(rows, first, last, scratch.data());
    });
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { NormOps<Norms>::implement(m); }

}  // namespace ds_kernels::cpu
