// Tensors that a binding makes: results, and room for a launch. torch's allocator keeps their memory for the current
// stream, so that they may go out of scope before the kernels have run.
#pragma once

#include <ds_kernels/arguments.h>

namespace ds_kernels::cuda {

// Contiguous, on the device of `like`.
inline Tensor new_float_tensor(const Tensor& like, Shape shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= std::max<int64_t>(shape[i], 1)) strides[i] = stride;
  const TensorRef model(like.get());
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                         strides.data(), aoti_torch_dtype_float32(),
                                                         model.device_type(), model.device_index(), &handle));
  return Tensor(handle);
}

inline Tensor no_elements(const Tensor& like) {
  const int64_t none = 0;
  return new_tensor(like, vector_of(none));
}

}  // namespace ds_kernels::cuda
