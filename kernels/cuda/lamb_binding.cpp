// The op of <ds_kernels/ops/lamb.h> for tensors on CUDA devices.
#include "lamb_launch.h"

#include <ds_kernels/ops/lamb.h>

#include "device.h"
#include "lists_of.h"
#include "new_tensors.h"

namespace ds_kernels::cuda {
namespace {

struct Lamb : Device {
  using Device::Device;

  void update(const MultiTensor& tensors, const std::vector<LambStep>& steps, float* ratios) const {
    const bool copies = tensors.lists() > kCopies;
    TensorLists lists = lists_of(tensors);
    lists.data.resize(kLambLists * tensors.size(), nullptr);
    const LambDtypes dtypes{tensors.dtype(kParams), tensors.dtype(kGrads), tensors.dtype(kExpAvgs),
                            copies ? tensors.dtype(kCopies) : Dtype::Float32};
    constexpr int64_t kFloats = sizeof(LambSums) / sizeof(float);
    const Room parts(*this, kFloats * lamb_parts(tensors.numels()));
    lamb_update(lists, dtypes, steps, reinterpret_cast<LambSums*>(parts.data()), ratios, stream());
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { LambOps<Lamb>::implement(m); }

}  // namespace ds_kernels::cuda
