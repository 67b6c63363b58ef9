// The one header through which kernels meet torch. It hides the choice of interface: LibTorch's stable ABI, so that
// one binary serves every Python and every torch from 2.11 on.
//
//   Tensor zap_gelu(const Tensor& input) { ... }
//   void zap_adam_(const TensorList& params, ..., double lr, ...) { ... }
//
//   DS_KERNELS_IMPL(PrivateUse1, m) {
//     m.impl("gelu", TORCH_BOX(&zap_gelu));
//     m.impl("adam_", DS_KERNELS_BOX(&zap_adam_));
//   }
//
// <ds_kernels/ops/...> has the SDK's ops for any device, as templates over a class of that device's:
//
//   struct ZapDevice {
//     explicit ZapDevice(int32_t index);  // makes the device of the call's tensors current, as long as it lives
//     void run(const char* op, const NormRows& work, Dtype dtype) const;  // one for each kind of work, or a template
//   };
//   DS_KERNELS_IMPL(PrivateUse1, m) { NormOps<ZapDevice>::implement(m); }
//
// run() puts the work into the device's stream. The arguments are checked, and contiguous where the work says so; what is
// not is in strides. `op` is the op's name, for errors. For work that does not depend on a dtype it is kAnyDtype.
//
// The schemas are defined in Python (ds_plugin_sdk.ops), which must be imported before such a binary is loaded.
#pragma once

#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION 0x020B000000000000  // torch 2.11; before any header of torch
#endif

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <ds_kernels/config.h>

#ifdef DS_KERNELS_OWN_THREADS
#include <algorithm>
#include <thread>
#endif

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // torch 2.11 has it by another name
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

static_assert(TORCH_FEATURE_VERSION == TORCH_TARGET_VERSION, "include ds_kernels/binding.h before torch's headers");

// DS_KERNELS_IMPL(CPU | CUDA | XPU | PrivateUse1, m) { m.impl(...); }
#define DS_KERNELS_IMPL(dispatch_key, m) STABLE_TORCH_LIBRARY_IMPL(ds_plugin, dispatch_key, m)

// For functions that take a TensorList and return nothing or one Tensor; TORCH_BOX for all others.
#define DS_KERNELS_BOX(function) (&::ds_kernels::detail::Boxed<(function)>::call)

// Throws what Python sees as RuntimeError("ds_plugin::<op>: <message>"). `op` is the op's name; the message's parts
// (text and whole numbers) say which argument, what it is, and what was expected.
#define DS_KERNELS_CHECK(condition, op, ...) \
  if (__builtin_expect(!(condition), 0)) ::ds_kernels::fail(op, {__VA_ARGS__})

namespace ds_kernels {

using torch::stable::Tensor;

// A piece of a message.
class Text {
 public:
  Text(const char* text) : text_(text) {}                    // NOLINT: implicit, so that messages read as lists
  Text(std::string text) : text_(std::move(text)) {}         // NOLINT: the same
  Text(int64_t number) : text_(std::to_string(number)) {}    // NOLINT: the same
  Text(size_t number) : text_(std::to_string(number)) {}     // NOLINT: the same
  const std::string& str() const { return text_; }

 private:
  std::string text_;
};

[[noreturn]] __attribute__((noinline, cold)) inline void fail(const char* op, std::initializer_list<Text> parts) {
  std::string message = std::string("ds_plugin::") + op + ": ";
  for (const Text& part : parts) message += part.str();
  throw std::runtime_error(message);
}

// torch's thread pool: calls `body(begin, end)` on parts of [begin, end), none smaller than `grain` if it can be helped.
//
// With DS_KERNELS_OWN_THREADS=<number>, as many new threads however small the work is: what a thread sanitizer can
// watch, which does not know how the threads of a pool wait for each other.
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
#ifdef DS_KERNELS_OWN_THREADS
  const int64_t part = std::max<int64_t>(1, (end - begin) / DS_KERNELS_OWN_THREADS);
  std::vector<std::thread> threads;
  for (int64_t first = begin; first < end; first += part) {
    threads.emplace_back([&, first] { body(first, std::min(first + part, end)); });
  }
  for (std::thread& thread : threads) thread.join();
#else
  torch::stable::parallel_for(begin, end, grain, body);
#endif
}

// Within its scope, ops called on tensors are not recorded for autograd.
class NoGrad {
 public:
  NoGrad() : enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(enabled_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  const bool enabled_;
};

// ---- tensors of a list -----------------------------------------------------------------------------------------
//
// An optimizer step takes thousands of tensors. torch::stable::Tensor allocates a reference count for each, which
// costs as much as the update of a small one; these do not.

using Shape = torch::headeronly::IntHeaderOnlyArrayRef;

// Those of torch 2.11, which has none; later ones are no templates, and so go first.
template <class T>
bool operator==(c10::HeaderOnlyArrayRef<T> a, c10::HeaderOnlyArrayRef<T> b) {
  return a.equals(b);
}
template <class T>
bool operator!=(c10::HeaderOnlyArrayRef<T> a, c10::HeaderOnlyArrayRef<T> b) {
  return !a.equals(b);
}

// A tensor that somebody else keeps alive.
class TensorRef {
 public:
  explicit TensorRef(AtenTensorHandle handle) : handle_(handle) {}

  void* data() const { return ask<void*>(aoti_torch_get_data_ptr); }
  int64_t numel() const { return ask<int64_t>(aoti_torch_get_numel); }
  bool is_contiguous() const { return ask<bool>(aoti_torch_is_contiguous); }
  Shape sizes() const { return {ask<int64_t*>(aoti_torch_get_sizes), dim()}; }
  Shape strides() const { return {ask<int64_t*>(aoti_torch_get_strides), dim()}; }

  // Codes of the shim, to be compared with each other or with what aoti_torch_dtype_*() return.
  int32_t dtype_code() const { return ask<int32_t>(aoti_torch_get_dtype); }
  int32_t device_type() const { return ask<int32_t>(aoti_torch_get_device_type); }
  int32_t device_index() const { return ask<int32_t>(aoti_torch_get_device_index); }

  // A handle of its own to the same tensor.
  Tensor tensor() const {
    AtenTensorHandle copy;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle_, &copy));
    return Tensor(copy);
  }

 private:
  template <class Answer>
  Answer ask(AOTITorchError (*question)(AtenTensorHandle, Answer*)) const {
    Answer answer;
    STABLE_TORCH_ERROR_CODE_CHECK(question(handle_, &answer));
    return answer;
  }

  size_t dim() const { return static_cast<size_t>(ask<int64_t>(aoti_torch_get_dim)); }

  AtenTensorHandle handle_;
};

class TensorList {
 public:
  // Takes the list off a boxed kernel's stack.
  explicit TensorList(StableIValue value) {
    const auto list = torch::stable::detail::to<StableListHandle>(value);
    size_t size = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
    handles_.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue element;
      STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &element));
      handles_.push_back(torch::stable::detail::to<AtenTensorHandle>(element));
    }
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
  }
  ~TensorList() {
    for (const AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
  }
  TensorList(TensorList&& other) noexcept : handles_(std::move(other.handles_)) { other.handles_.clear(); }
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;

  size_t size() const { return handles_.size(); }
  TensorRef operator[](size_t index) const { return TensorRef(handles_[index]); }

 private:
  std::vector<AtenTensorHandle> handles_;
};

namespace detail {

template <class T>
T unbox(StableIValue value) {
  if constexpr (std::is_same_v<T, TensorList>) {
    return TensorList(value);
  } else {
    return torch::stable::detail::to<T>(value);
  }
}

// A function as torch calls it: arguments on a stack.
template <auto function>
struct Boxed;

template <class Result, class... Args, Result (*function)(Args...)>
struct Boxed<function> {
  static void call(StableIValue* stack, uint64_t arguments, uint64_t) {
    if (arguments != sizeof...(Args)) throw std::runtime_error("ds_plugin: the schema does not fit the kernel");
    call_on(stack, std::index_sequence_for<Args...>());
  }

  template <size_t... I>
  static void call_on(StableIValue* stack, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<Result>) {
      function(unbox<std::decay_t<Args>>(stack[I])...);
    } else {
      stack[0] = torch::stable::detail::from(function(unbox<std::decay_t<Args>>(stack[I])...));
    }
  }
};

}  // namespace detail

// ---- dtypes and shapes -----------------------------------------------------------------------------------------

inline const char* name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::Float32: return "float32";
    case Dtype::BFloat16: return "bfloat16";
    default: return "float16";
  }
}

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::Float32 ? 4 : 2; }

// The dtype of `tensor`; fails, naming `argument`, on any other than float32, bfloat16 and float16.
inline Dtype dtype_of(const char* op, const char* argument, TensorRef tensor) {
  const int32_t code = tensor.dtype_code();
  if (code == aoti_torch_dtype_float32()) return Dtype::Float32;
  if (code == aoti_torch_dtype_bfloat16()) return Dtype::BFloat16;
  if (code == aoti_torch_dtype_float16()) return Dtype::Float16;
  fail(op, {argument, " has a dtype that this kernel does not handle; expected float32, bfloat16 or float16"});
}

inline std::string text_of(Shape shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ']';
}

}  // namespace ds_kernels
