// Tensors for C functions beside ops, which Python calls past torch's dispatcher.
#pragma once

#include <ds_kernels/binding.h>

namespace ds_kernels::cpu {

// `impl` is an at::TensorImpl*. A handle of the stable ABI is an at::Tensor*, and a Tensor holds one pointer to a
// TensorImpl.
inline TensorRef tensor_of(void*& impl) { return TensorRef(reinterpret_cast<AtenTensorHandle>(&impl)); }

// Whether a tensor is contiguous, in host memory, and of a dtype that kernels have. With fewer than two elements none is:
// it is contiguous whatever its strides, and may be a part of a complex number, negated.
inline bool is_plain(void*& impl, Dtype& dtype) {
  const TensorRef tensor = tensor_of(impl);
  int32_t layout;
  if (aoti_torch_get_layout(reinterpret_cast<AtenTensorHandle>(&impl), &layout)) return false;
  if (layout != aoti_torch_layout_strided() || tensor.device_type() != aoti_torch_device_type_cpu()) return false;
  if (!tensor.is_contiguous() || tensor.numel() < 2) return false;
  const int32_t code = tensor.dtype_code();
  for (const auto& [known, its] : {std::pair(aoti_torch_dtype_float32(), Dtype::Float32),
                                   std::pair(aoti_torch_dtype_bfloat16(), Dtype::BFloat16),
                                   std::pair(aoti_torch_dtype_float16(), Dtype::Float16)}) {
    if (code == known) return dtype = its, true;
  }
  return false;
}

}  // namespace ds_kernels::cpu
