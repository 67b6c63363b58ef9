// The ops without which there are no tensors: making them, their views and sizes, copying, filling. All others run on
// the CPU (fallback.cpp) until there is a kernel.
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

#include "device.h"
#include "storage.h"

namespace ds_device {
namespace {

using at::Tensor;
using c10::Device, c10::IntArrayRef;
using runtime::Direction;

// ------------------------------------------------------------------------------------------------ making tensors

void reject_pinned(std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only host tensors can be pinned");
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> /*layout*/,
             std::optional<Device> device, std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  reject_pinned(pin_memory);
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout> /*layout*/, std::optional<Device> device,
                     std::optional<bool> pin_memory) {
  reject_pinned(pin_memory);
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// -------------------------------------------------------------------------------------------------- their memory

// Gives a tensor's storage the bytes that its sizes and strides reach.
void grow_storage(const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const std::size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                             static_cast<std::size_t>(tensor.storage_offset()));
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (bytes > storage.nbytes()) resize_storage(storage, bytes);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  grow_storage(self);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, std::int64_t offset, IntArrayRef size, IntArrayRef stride) {
  TORCH_CHECK(offset >= 0, "set_: invalid storage offset ", offset);
  TORCH_CHECK(stride.data() == nullptr || stride.size() == size.size(), "set_: ", size.size(), " sizes, but ",
              stride.size(), " strides");
  TORCH_CHECK(storage.device() == self.device(), "set_: a storage on ", storage.device(), " for a tensor on ",
              self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  grow_storage(self);
  return self;
}

// No storage of its own, and no elements.
Tensor& set_none(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), true), 0, {0}, {});
}

void record_tensor_stream(Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

// ------------------------------------------------------------------------------------------------------- kernels

// The two kernels that a tensor needs, ds_device::copy_ and ds_device::fill_. Here they are the CPU's; a vendor's own are
// registered for PrivateUse1 and go first.

// A tensor as a kernel gets it: an address and numbers.
struct View {
  void* address;
  c10::ScalarType dtype;
  c10::DimVector sizes, strides;
  bool conj, neg;

  explicit View(const Tensor& tensor)
      : address(const_cast<void*>(tensor.const_data_ptr())),
        dtype(tensor.scalar_type()),
        sizes(tensor.sizes()),
        strides(tensor.strides()),
        conj(tensor.is_conj()),
        neg(tensor.is_neg()) {}

  // The bytes from the first element to the last, gaps included.
  std::size_t bytes() const { return at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype)); }

  Tensor on_cpu(void* memory) const {
    Tensor tensor = at::from_blob(memory, sizes, strides, at::TensorOptions(dtype));
    tensor._set_conj(conj);
    tensor._set_neg(neg);
    return tensor;
  }
};

// Whether the CPU can compute in device memory, on a stream.
bool kernels_run_on_cpu() { return runtime::launch != nullptr && runtime::kernel_address != nullptr; }

Tensor bytes_on_cpu(const View& view, runtime::Stream stream) {
  Tensor bytes = at::empty({static_cast<std::int64_t>(view.bytes())}, at::TensorOptions(at::kByte));
  runtime::memcpy_async(bytes.mutable_data_ptr(), view.address, view.bytes(), Direction::DeviceToHost, stream);
  runtime::stream_synchronize(stream);
  return bytes;
}

void bytes_to_device(const Tensor& bytes, const View& view, runtime::Stream stream) {
  runtime::memcpy_async(view.address, bytes.const_data_ptr(), view.bytes(), Direction::HostToDevice, stream);
  runtime::stream_synchronize(stream);
}

void copy_by_cpu(const Tensor& to, const Tensor& from) {
  const View source(from), target(to);
  const runtime::Stream stream = current_runtime_stream(to.device().index());
  if (kernels_run_on_cpu()) {
    const auto kernel = [source, target] {
      const at::AutoDispatchBelowADInplaceOrView no_autograd;
      target.on_cpu(runtime::in_kernel(target.address)).copy_(source.on_cpu(runtime::in_kernel(source.address)));
    };
    return runtime::launch(stream, kernel, "copy_");
  }
  const Tensor read = bytes_on_cpu(source, stream);
  const Tensor written = bytes_on_cpu(target, stream);  // for what lies in its gaps
  target.on_cpu(written.mutable_data_ptr()).copy_(source.on_cpu(read.mutable_data_ptr()));
  bytes_to_device(written, target, stream);
}

void fill_by_cpu(const Tensor& self, const at::Scalar& value) {
  const View target(self);
  const runtime::Stream stream = current_runtime_stream(self.device().index());
  if (kernels_run_on_cpu()) {
    const auto kernel = [target, value] {
      const at::AutoDispatchBelowADInplaceOrView no_autograd;
      target.on_cpu(runtime::in_kernel(target.address)).fill_(value);
    };
    return runtime::launch(stream, kernel, "fill_");
  }
  const Tensor written = bytes_on_cpu(target, stream);
  target.on_cpu(written.mutable_data_ptr()).fill_(value);
  bytes_to_device(written, target, stream);
}

void copy_kernel(const Tensor& to, const Tensor& from) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ds_device::copy_", "")
                             .typed<void(const Tensor&, const Tensor&)>();
  op.call(to, from);
}

Tensor& fill_(Tensor& self, const at::Scalar& value) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ds_device::fill_", "")
                             .typed<void(const Tensor&, const at::Scalar&)>();
  if (self.numel() > 0) op.call(self, value);
  return self;
}

Tensor& zero_(Tensor& self) {
  if (self.numel() == 0) return self;
  if (!self.is_non_overlapping_and_dense()) return fill_(self, at::Scalar(0));
  runtime::memset_async(self.mutable_data_ptr(), 0, self.nbytes(), current_runtime_stream(self.device().index()));
  return self;
}

// ------------------------------------------------------------------------------------------------------- copying

// Whether the bytes of one tensor, as they lie, are those of the other.
bool same_layout(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.strides() == b.strides() && a.is_non_overlapping_and_dense() &&
         a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// Whether the bytes of a tensor can be copied in one piece and mean what they say.
bool plain(const Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

Tensor empty_like_at(const Tensor& like, c10::ScalarType dtype, Device device) {
  return at::empty_strided(like.sizes(), like.strides(), at::TensorOptions(dtype).device(device));
}

void copy_on_device(const Tensor& from, const Tensor& to) {
  if (same_layout(from, to)) {
    runtime::memcpy_async(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), Direction::DeviceToDevice,
                          current_runtime_stream(to.device().index()));
  } else {
    copy_kernel(to, from);
  }
}

// Lets `later` continue only after what `earlier` has to do now.
void order(runtime::Stream earlier, runtime::Stream later) {
  runtime::Event* event = event_after(earlier);
  runtime::stream_wait_event(later, event);
  runtime::event_destroy(event);
}

// The copy runs on the source's stream; the target's lets it begin, and waits for its end.
void copy_between_devices(const Tensor& from, const Tensor& to) {
  if (!same_layout(from, to)) {
    const Tensor sent = at::empty(to.sizes(), to.options().device(from.device()));
    copy_on_device(from, sent);
    const Tensor received = at::empty(to.sizes(), to.options());
    copy_between_devices(sent, received);
    copy_on_device(received, to);
    return;
  }
  const runtime::Stream source = current_runtime_stream(from.device().index());
  const runtime::Stream target = current_runtime_stream(to.device().index());
  order(target, source);
  runtime::memcpy_async(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), Direction::DeviceToDevice, source);
  order(source, target);
}

// One piece, host to device or back. Pinned host memory may be left to the stream; other has to be waited for.
void transfer(const Tensor& from, const Tensor& to, Direction direction, bool non_blocking) {
  const Tensor& host = direction == Direction::HostToDevice ? from : to;
  const Tensor& device = direction == Direction::HostToDevice ? to : from;
  const runtime::Stream stream = current_runtime_stream(device.device().index());
  runtime::memcpy_async(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), direction, stream);
  if (non_blocking && is_pinned(host.const_data_ptr())) {
    record_pinned(host.const_data_ptr(), stream);
  } else {
    runtime::stream_synchronize(stream);
  }
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (same_layout(from, to)) {
    transfer(from, to, Direction::HostToDevice, non_blocking);
  } else if (plain(to)) {
    transfer(empty_like_at(to, to.scalar_type(), c10::kCPU).copy_(from), to, Direction::HostToDevice, false);
  } else {
    const Tensor received = at::empty(to.sizes(), to.options());
    copy_to_device(from, received, non_blocking);
    copy_on_device(received, to);
  }
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (same_layout(from, to)) {
    transfer(from, to, Direction::DeviceToHost, non_blocking);
  } else if (plain(from)) {
    const Tensor received = empty_like_at(from, from.scalar_type(), c10::kCPU);
    transfer(from, received, Direction::DeviceToHost, false);
    to.copy_(received);
  } else {
    const Tensor sent = at::empty(from.sizes(), from.options());
    copy_on_device(from, sent);
    copy_to_host(sent, to, non_blocking);
  }
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  const Tensor from = self.expand(to.sizes());
  if (to.numel() == 0) return to;
  at::assert_no_internal_overlap(to);
  if (from.device() == to.device()) at::assert_no_partial_overlap(to, from);
  const c10::DeviceGuard guard(to.is_privateuseone() ? to.device() : from.device());
  if (!from.is_privateuseone()) {
    copy_to_device(from, to, non_blocking);
  } else if (!to.is_privateuseone()) {
    copy_to_host(from, to, non_blocking);
  } else if (from.device() == to.device()) {
    copy_on_device(from, to);
  } else {
    copy_between_devices(from, to);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

// The inputs of an op that the CPU computes: all are on their way before the first is waited for.
std::vector<Tensor> to_cpu(at::TensorList tensors) {
  std::vector<Tensor> copies;
  std::set<c10::DeviceIndex> devices;
  for (const Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.is_privateuseone() || !plain(tensor) || tensor.numel() == 0) {
      copies.push_back(tensor.defined() ? tensor.cpu() : tensor);
      continue;
    }
    copies.push_back(empty_like_at(tensor, tensor.scalar_type(), c10::kCPU));
    runtime::memcpy_async(copies.back().mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes(),
                          Direction::DeviceToHost, current_runtime_stream(tensor.device().index()));
    devices.insert(tensor.device().index());
  }
  for (const c10::DeviceIndex device : devices) runtime::stream_synchronize(current_runtime_stream(device));
  return copies;
}

// Whether `self.data = from` may be done, which torch leaves to the device: here between it and the host too, as for
// torch's own. Else `module.to(device)` makes new parameters, and who holds the old ones trains what is no longer there.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  const auto dense = [](c10::DispatchKeySet keys) {
    return keys.has_any(c10::DispatchKeySet(c10::DispatchKey::Dense)) &&
           (keys.has_backend(c10::BackendComponent::CPUBit) || keys.has_backend(c10::BackendComponent::PrivateUse1Bit));
  };
  return (dense(self.key_set()) && dense(from.key_set())) ||
         self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

at::Scalar local_scalar_dense(const Tensor& self) { return self.cpu().item(); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", TORCH_FN(static_cast<Tensor& (*)(Tensor&, c10::Storage)>(at::native::set_)));
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_", set_none);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("record_stream", record_tensor_stream);
  m.impl("fill_.Scalar", fill_);
  m.impl("zero_", zero_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_to_cpu", to_cpu);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

TORCH_LIBRARY_FRAGMENT(ds_device, m) {
  m.def("copy_(Tensor(a!) self, Tensor src) -> ()");
  m.def("fill_(Tensor(a!) self, Scalar value) -> ()");
}
TORCH_LIBRARY_IMPL(ds_device, CompositeExplicitAutograd, m) {
  m.impl("copy_", copy_by_cpu);
  m.impl("fill_", fill_by_cpu);
}

// Copying knows lazily conjugated and negated tensors; torch's way to resolve them would copy, and so come back here.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(ds_device, Conjugate, m) { m.impl("copy_", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(ds_device, Negative, m) { m.impl("copy_", torch::CppFunction::makeFallthrough()); }

}  // namespace ds_device
