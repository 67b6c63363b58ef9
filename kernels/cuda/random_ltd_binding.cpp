// The ops of <ds_kernels/ops/random_ltd.h> for tensors on CUDA devices.
#include "random_ltd_launch.h"

#include <ds_kernels/ops/random_ltd.h>

#include "new_tensors.h"

namespace ds_kernels::cuda {
namespace {

struct RandomLTD : Device {
  using Device::Device;

  // To know it would be to wait for the device: kernels assert it.
  bool within(const char*, const int32_t*, int64_t, int64_t) const { return true; }

  void sort(const char* op, const TokenRows& rows) const { launch_token_sort(op, rows, stream()); }
  void gather(const char* op, const TokenMove& move) const { launch_token_gather(op, move, stream()); }
  void scatter(const char* op, const TokenMove& move) const {
    const Room last(*this, move.batch * move.sequence);
    launch_token_scatter(op, move, reinterpret_cast<int32_t*>(last.data()), stream());
  }
  void gather_mask(const char* op, const MaskGather& mask) const { launch_mask_gather(op, mask, stream()); }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { RandomLTDOps<RandomLTD>::implement(m); }

}  // namespace ds_kernels::cuda
