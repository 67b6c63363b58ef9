// Functions that Python calls past torch's dispatcher, which takes several times as long as the work on a small tensor.
// ds_plugin_sdk/ops/_c_function.py takes them from the loaded library.
#pragma once

#include <ds_kernels/binding.h>
#include <ds_kernels/python.h>

namespace ds_kernels::cpu {

// Other threads of Python run within its scope.
class OtherThreads {
 public:
  OtherThreads() : state_(python::PyEval_SaveThread()) {}
  ~OtherThreads() noexcept(false) { python::PyEval_RestoreThread(state_); }  // at Python's end it ends the thread
  OtherThreads(const OtherThreads&) = delete;
  OtherThreads& operator=(const OtherThreads&) = delete;

 private:
  void* const state_;
};

// A call's arguments, one after the other. What Python raised about one is forgotten: the op says what is wrong.
class Arguments {
 public:
  // `classes` is (torch.Tensor, torch.nn.Parameter, list).
  Arguments(python::Object* classes, python::Object* const* all, intptr_t count)
      : tensor_class_(python::PyTuple_GetItem(classes, 0)),
        parameter_class_(python::PyTuple_GetItem(classes, 1)),
        list_class_(python::PyTuple_GetItem(classes, 2)),
        next_(all),
        end_(all + count) {}

  size_t left() const { return static_cast<size_t>(end_ - next_); }

  bool take(int64_t& number) {
    number = python::PyLong_AsLongLong(*next_++);
    return number != -1 || fine();
  }

  bool take(double& number) {
    number = python::PyFloat_AsDouble(*next_++);
    return number != -1 || fine();
  }

  // torch's pointer to the at::TensorImpl of a tensor that is of no other class.
  bool take(void*& impl) { return find(*next_++, impl); }

  // The same of a list of tensors.
  bool take(std::vector<void*>& impls) {
    python::Object* const list = *next_++;
    const intptr_t size = python::PyList_Size(list);
    if (size < 0) return fine();
    impls.resize(static_cast<size_t>(size));
    for (intptr_t i = 0; i < size; ++i) {
      if (!find(python::PyList_GetItem(list, i), impls[static_cast<size_t>(i)])) return false;
    }
    return true;
  }

  // Whether the next argument is a list.
  bool is_list() const { return next_ != end_ && class_of(*next_) == list_class_; }

 private:
  static python::Object* class_of(python::Object* object) {
    python::Object* const its_class = python::PyObject_Type(object);
    python::Py_DecRef(its_class);  // the object keeps it
    return its_class;
  }

  bool find(python::Object* tensor, void*& impl) const {
    static python::Object* const name = python::PyUnicode_InternFromString("_cdata");
    python::Object* const its_class = class_of(tensor);
    if (its_class != tensor_class_ && its_class != parameter_class_) return false;
    python::Object* const address = python::PyObject_GetAttr(tensor, name);
    if (address == nullptr) return fine();
    impl = python::PyLong_AsVoidPtr(address);
    python::Py_DecRef(address);
    return impl != nullptr || fine();
  }

  static bool fine() {
    if (python::PyErr_Occurred() == nullptr) return true;
    python::PyErr_Clear();
    return false;
  }

  python::Object* tensor_class_;
  python::Object* parameter_class_;
  python::Object* list_class_;
  python::Object* const* next_;
  python::Object* const* end_;
};

// A handle of the stable ABI is an at::Tensor*, and a Tensor holds one pointer to a TensorImpl.
inline TensorRef tensor_of(void*& impl) { return TensorRef(reinterpret_cast<AtenTensorHandle>(&impl)); }

// Whether a tensor is contiguous, in host memory, and of a dtype that kernels have. With fewer than two elements none is:
// it is contiguous whatever its strides, and may be a part of a complex number, negated.
inline bool is_plain(void*& impl, Dtype& dtype) {
  static const int32_t strided = aoti_torch_layout_strided(), cpu = aoti_torch_device_type_cpu();
  static const std::pair<int32_t, Dtype> dtypes[] = {{aoti_torch_dtype_float32(), Dtype::Float32},
                                                     {aoti_torch_dtype_bfloat16(), Dtype::BFloat16},
                                                     {aoti_torch_dtype_float16(), Dtype::Float16}};
  const TensorRef tensor = tensor_of(impl);
  int32_t layout;
  if (aoti_torch_get_layout(reinterpret_cast<AtenTensorHandle>(&impl), &layout)) return false;
  if (layout != strided || tensor.device_type() != cpu || !tensor.is_contiguous() || tensor.numel() < 2) return false;
  const int32_t code = tensor.dtype_code();
  for (const auto& [known, its] : dtypes) {
    if (code == known) return dtype = its, true;
  }
  return false;
}

}  // namespace ds_kernels::cpu

// Defines ds_kernels_<family>_function(), which gives Python `<family>_function(Arguments)`: an int64_t.
#define DS_KERNELS_PYTHON_FUNCTION(family)                                                                          \
  namespace ds_kernels::cpu {                                                                                      \
  static int64_t family##_function(Arguments arguments);                                                          \
  static python::Object* family##_call(python::Object* self, python::Object* const* arguments, intptr_t count) {  \
    int64_t result = -1;                                                                                           \
    try {                                                                                                          \
      result = family##_function({self, arguments, count});                                                       \
    } catch (const std::exception&) {                                                                              \
    }                                                                                                              \
    return python::PyLong_FromLongLong(result);                                                                    \
  }                                                                                                                \
  }                                                                                                                \
  extern "C" __attribute__((visibility("default"))) void* ds_kernels_##family##_function(void* classes) {          \
    using namespace ds_kernels;                                                                                    \
    using namespace ds_kernels::cpu;                                                                               \
    static python::Method method = {#family, family##_call, python::kFastCall, nullptr};                           \
    return python::PyCFunction_NewEx(&method, classes, nullptr);                                                   \
  }                                                                                                                \
  static int64_t ds_kernels::cpu::family##_function(Arguments arguments)
