// The ops of <ds_kernels/ops/spatial.h> for tensors in host memory.
#include "spatial_loops.h"

#include <ds_kernels/ops/spatial.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(SpatialLoops, spatial_loops)

namespace {

struct Spatial : Host {
  using Host::Host;

  void add_bias(const char* op, const BiasRows& rows, Dtype dtype) const {
    const BiasLoop loop = loops_for(op, all_spatial_loops()).bias_add(dtype);
    parallel_for(0, rows.rows, row_grain(rows.columns), [&](int64_t first, int64_t last) { loop(rows, first, last); });
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { SpatialOps<Spatial>::implement(m); }

}  // namespace ds_kernels::cpu
