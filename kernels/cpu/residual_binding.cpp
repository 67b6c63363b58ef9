// The ops of <ds_kernels/ops/residual.h> for tensors in host memory.
#include "residual_loops.h"

#include <ds_kernels/ops/residual.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(ResidualLoops, residual_loops)

namespace {

struct Residuals : Host {
  using Host::Host;

  void add_bias(const char* op, const ResidualRows& rows, Dtype dtype) const {
    run(loops_for(op, all_residual_loops()).add_bias(dtype), rows);
  }
  void mix(const char* op, const MixRows& rows, Dtype dtype) const {
    run(loops_for(op, all_residual_loops()).mix(dtype), rows);
  }

  template <class Loop, class Rows>
  static void run(Loop loop, const Rows& rows) {
    parallel_for(0, rows.rows, row_grain(rows.columns), [&](int64_t first, int64_t last) { loop(rows, first, last); });
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { ResidualOps<Residuals>::implement(m); }

}  // namespace ds_kernels::cpu
