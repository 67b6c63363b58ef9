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

  void update(const MultiTensor& tensors, const std::vector<LambStep>& steps, const Tensor& ratios) const {
    const bool copies = tensors.lists() > kCopies;
    TensorLists lists = lists_of(tensors);
    lists.data.resize(kLambLists * tensors.size(), nullptr);
    const LambDtypes dtypes{tensors.dtype(kParams), tensors.dtype(kGrads), tensors.dtype(kExpAvgs),
                            copies ? tensors.dtype(kCopies) : Dtype::Float32};
    const int64_t floats = lamb_parts(tensors.numels()) * static_cast<int64_t>(sizeof(LambSums) / sizeof(float));
    const Tensor parts = new_float_tensor(ratios, vector_of(floats));
    lamb_update(lists, dtypes, steps, static_cast<LambSums*>(parts.data_ptr()), static_cast<float*>(ratios.data_ptr()),
                stream());
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { LambOps<Lamb>::implement(m); }

}  // namespace ds_kernels::cuda
