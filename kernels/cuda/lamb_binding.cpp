// ds_plugin::lamb_ for tensors on CUDA devices.
#include "lamb_launch.h"
#include "device.h"
#include "lists_of.h"

namespace ds_kernels::cuda {
namespace {

constexpr const char* kOp = "lamb_";
enum Lists { kParams, kGrads, kExpAvgs, kExpAvgSqs, kCopies, kLists };

MultiTensor checked(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                    const TensorList& exp_avg_sqs, const TensorList& copies) {
  const ListArgument p{"params", params, true}, g{"grads", grads, false}, m{"exp_avgs", exp_avgs, true},
      v{"exp_avg_sqs", exp_avg_sqs, true}, c{"copies", copies, true};
  return copies.size() == 0 ? MultiTensor(kOp, {p, g, m, v}) : MultiTensor(kOp, {p, g, m, v, c});
}

// Type and index of the tensors' device; of no tensors, the CPU: there is nothing to compute, and nowhere to do it.
std::pair<int32_t, int32_t> device_of(const TensorList& tensors) {
  if (tensors.size() == 0) return {aoti_torch_device_type_cpu(), 0};
  return {tensors[0].device_type(), tensors[0].device_index()};
}

Tensor new_tensor(int64_t size, int32_t dtype, int32_t device_type, int32_t device) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, dtype, device_type, device, &handle));
  return Tensor(handle);
}

Tensor lamb_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
             const TensorList& exp_avg_sqs, const TensorList& copies, const std::vector<int64_t>& steps, double lr,
             double beta1, double beta2, double eps, double weight_decay, double min_coeff, double max_coeff,
             double grad_scale, bool eps_inside_sqrt, bool bias_correction, bool correct_inside) {
  MultiTensor tensors = checked(params, grads, exp_avgs, exp_avg_sqs, copies);
  tensors.check_dtypes(2, true);
  const LambOptions options{lr,         beta1,      beta2,           eps,             weight_decay,  min_coeff,
                            max_coeff,  grad_scale, eps_inside_sqrt, bias_correction, correct_inside};
  const auto constants = steps_of(kOp, steps, tensors.size(), [&](int64_t step) { return lamb_step(options, step); });
  const auto [device_type, device] = device_of(params);
  const Tensor ratios =
      new_tensor(static_cast<int64_t>(tensors.size()), aoti_torch_dtype_float32(), device_type, device);
  if (tensors.size() == 0) return ratios;
  const Device current(device);
  TensorLists lists = lists_of(tensors);
  if (copies.size() == 0) lists.data.resize(kLists * tensors.size(), nullptr);
  const LambDtypes dtypes{tensors.dtype(kParams), tensors.dtype(kGrads), tensors.dtype(kExpAvgs),
                          copies.size() ? tensors.dtype(kCopies) : Dtype::Float32};
  // torch's allocator keeps its memory for this stream until the kernels have run.
  const Tensor parts = new_tensor(2 * lamb_parts(tensors.numels()), aoti_torch_dtype_float64(), device_type, device);
  lamb_update(lists, dtypes, constants, static_cast<LambSums*>(parts.data_ptr()),
              static_cast<float*>(ratios.data_ptr()), current.stream());
  tensors.write_back();
  return ratios;
}

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { m.impl("lamb_", DS_KERNELS_BOX(&lamb_)); }

}  // namespace ds_kernels::cuda
