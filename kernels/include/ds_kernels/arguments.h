// Single tensors as arguments of an op: checked against each other, and laid out as loops want them.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include <ds_kernels/multi_tensor.h>

namespace ds_kernels {

using OptionalTensor = std::optional<Tensor>;

// The tensor, or a contiguous copy.
inline Tensor without_gaps(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  const NoGrad guard;
  return torch::stable::contiguous(tensor);
}

// The arguments of one call. Its methods check an argument, fail naming it, and give its elements, contiguous: those of
// a copy where the tensor is not.
class Arguments {
 public:
  // `first` decides on dtype and device.
  Arguments(const char* op, const char* name, const Tensor& first)
      : op_(op),
        first_(name),
        dtype_(dtype_of(op, name, TensorRef(first.get()))),
        device_type_(TensorRef(first.get()).device_type()),
        device_(TensorRef(first.get()).device_index()) {}

  const char* op() const { return op_; }
  Dtype dtype() const { return dtype_; }
  int32_t device_index() const { return device_; }

  // Elements that are only read, of the first argument's dtype; after write(), so that they stay what they are.
  const void* read(const char* name, const Tensor& tensor, Shape shape) {
    check(name, tensor, shape);
    if (tensor.is_contiguous() && !is_written(tensor)) return tensor.data_ptr();
    copies_.push_back(apart(without_gaps(tensor)));
    return copies_.back().data_ptr();
  }
  // The same, or null.
  const void* read(const char* name, const OptionalTensor& tensor, Shape shape) {
    return tensor ? read(name, *tensor, shape) : nullptr;
  }

  // Elements that are modified; write_back() puts them in place.
  void* write(const char* name, const Tensor& tensor, Shape shape) {
    check(name, tensor, shape);
    if (tensor.is_contiguous()) {
      write_in_place(tensor);
      return tensor.data_ptr();
    }
    check_elements(name, tensor);
    written_.push_back({tensor, without_gaps(tensor)});
    return written_.back().second.data_ptr();
  }
  void write_back() {
    const NoGrad guard;
    for (auto& [original, copy] : written_) torch::stable::copy_(original, copy);
  }

  // Says that a tensor is written where it is, for those who do without write().
  void write_in_place(const Tensor& tensor) { in_place_.at(in_place_count_++) = detail::memory_of(tensor); }

  // The tensor; a copy of it where that is written in place, for the values that the caller gave.
  Tensor apart(const Tensor& tensor) const {
    if (!is_written(tensor)) return tensor;
    const NoGrad guard;
    return torch::stable::clone(tensor);
  }

  void check_elements(const char* name, const Tensor& written) const {
    DS_KERNELS_CHECK(!detail::may_overlap_itself(written.sizes(), written.strides()), op_, name,
                     " has elements that share memory (is it expanded?); expected one element at each index");
  }

  // On the first argument's device, of its dtype, of this shape.
  void check(const char* name, const Tensor& tensor, Shape shape) const {
    check_device(name, tensor);
    DS_KERNELS_CHECK(dtype_of(op_, name, TensorRef(tensor.get())) == dtype_, op_, name,
                     " has another dtype than ", first_, "; expected ", name_of(dtype_));
    DS_KERNELS_CHECK(tensor.sizes() == shape, op_, name, " has shape ", text_of(tensor.sizes()), "; expected ",
                     text_of(shape));
  }

  void check_device(const char* name, const Tensor& tensor) const {
    const TensorRef ref(tensor.get());
    DS_KERNELS_CHECK(ref.device_type() == device_type_ && ref.device_index() == device_, op_, name,
                     " is on another device than ", first_, "; expected all tensors on one");
  }

 private:
  bool is_written(const Tensor& tensor) const {
    if (in_place_count_ == 0) return false;
    const detail::Memory memory = detail::memory_of(tensor);
    return std::any_of(in_place_.begin(), in_place_.begin() + in_place_count_,
                       [&](const detail::Memory& written) { return written.meets(memory); });
  }

  const char* op_;
  const char* first_;
  Dtype dtype_;
  int32_t device_type_, device_;
  std::vector<Tensor> copies_;
  std::vector<std::pair<Tensor, Tensor>> written_;
  std::array<detail::Memory, 4> in_place_;
  size_t in_place_count_ = 0;
};

// A new contiguous tensor; dtype and device are codes of the shim.
inline Tensor new_tensor(Shape shape, int32_t dtype, int32_t device_type, int32_t device) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= std::max<int64_t>(shape[i], 1)) strides[i] = stride;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                         strides.data(), dtype, device_type, device, &handle));
  return Tensor(handle);
}

// The same, of the dtype and on the device of `like`.
inline Tensor new_tensor(const Tensor& like, Shape shape) {
  const TensorRef model(like.get());
  return new_tensor(shape, model.dtype_code(), model.device_type(), model.device_index());
}

inline Tensor new_float_tensor(const Tensor& like, Shape shape) {
  const TensorRef model(like.get());
  return new_tensor(shape, aoti_torch_dtype_float32(), model.device_type(), model.device_index());
}

// What stands for a result that is not there.
inline Tensor no_elements(const Tensor& like) {
  const int64_t none = 0;
  return new_tensor(like, {&none, 1});
}

// A shape of one dimension.
inline Shape vector_of(const int64_t& size) { return {&size, 1}; }

// The product of all sizes but the last.
inline int64_t rows_of(const char* op, const char* name, const Tensor& tensor) {
  DS_KERNELS_CHECK(tensor.dim() > 0, op, name, " has no dimensions; expected [..., columns]");
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) rows *= tensor.size(i);
  return rows;
}

}  // namespace ds_kernels
