// The ops of <ds_kernels/ops/activation.h> for tensors in host memory.
#include "activation_loops.h"

#include <ds_kernels/ops/activation.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(ActivationLoops, activation_loops)

namespace {

struct Activations : Host {
  using Host::Host;

  void bias_activation(const char* op, const ActivationRows& rows, Activation activation, Dtype dtype) const {
    run(loops_for(op, all_activation_loops()).bias_activation(dtype, activation), rows);
  }
  void gated_activation(const char* op, const ActivationRows& rows, Activation activation, Dtype dtype) const {
    run(loops_for(op, all_activation_loops()).gated_activation(dtype, activation), rows);
  }

  static void run(ActivationLoop loop, const ActivationRows& rows) {
    parallel_for(0, rows.rows, row_grain(rows.columns), [&](int64_t first, int64_t last) { loop(rows, first, last); });
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { ActivationOps<Activations>::implement(m); }

}  // namespace ds_kernels::cpu
