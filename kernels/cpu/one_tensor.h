// An optimizer's update of one tensor as a function of Python, beside the op that takes lists: DeepSpeed's optimizers on
// the host call for each parameter.
//
//   // param, grad, exp_avg, lr, beta1, beta2, weight_decay
//   DS_KERNELS_ONE_TENSOR(lion, 3, 4) { return one.update("lion_", LionLists{one.tensors(), lion_step(...)}); }
#pragma once

#include "device.h"
#include "python_function.h"

namespace ds_kernels::cpu {

// A parameter, its gradient, and one state or two; and the op's numbers.
template <size_t Lists, size_t Numbers>
class OneTensor {
 public:
  explicit OneTensor(Arguments arguments) : understood_(arguments.left() == Lists + Numbers) {
    for (size_t i = 0; understood_ && i < Lists; ++i) understood_ = arguments.take(impls_[i]);
    for (size_t i = 0; understood_ && i < Numbers; ++i) understood_ = arguments.take(numbers_[i]);
    understood_ = understood_ && fit() && apart();
  }

  // Whether all are plain, in memory of their own, and of shapes and dtypes that fit together.
  bool understood() const { return understood_; }
  double number(size_t i) const { return numbers_[i]; }
  TensorLists tensors() const { return {Lists, 1, &numel_, data_, dtypes_}; }

  template <class Work>
  bool update(const char* op, const Work& work) const {
    const OtherThreads others;
    Device(0).run(op, work, dtypes_[0]);
    return true;
  }

 private:
  bool fit() {
    const Shape shape = at(0).sizes();
    for (size_t i = 0; i < Lists; ++i) {
      if (!is_plain(impls_[i], dtypes_[i]) || at(i).sizes() != shape) return false;
      if (i > 0 && dtypes_[i] != dtypes_[0] && dtypes_[i] != Dtype::Float32) return false;
      data_[i] = at(i).data();
    }
    numel_ = at(0).numel();
    return dtypes_[Lists - 1] == dtypes_[2];
  }

  TensorRef at(size_t list) { return tensor_of(impls_[list]); }

  // Whether no two share memory.
  bool apart() const {
    for (size_t i = 0; i < Lists; ++i) {
      const auto begin = reinterpret_cast<uintptr_t>(data_[i]), end = begin + numel_ * size_of(dtypes_[i]);
      if (begin == 0) return false;
      for (size_t j = 0; j < i; ++j) {
        const auto other = reinterpret_cast<uintptr_t>(data_[j]);
        if (begin < other + numel_ * size_of(dtypes_[j]) && other < end) return false;
      }
    }
    return true;
  }

  void* impls_[Lists] = {};
  void* data_[Lists] = {};
  Dtype dtypes_[Lists] = {};
  int64_t numel_ = 0;
  double numbers_[Numbers] = {};
  bool understood_;
};

}  // namespace ds_kernels::cpu

// Gives 0; or -1 where nothing was written, and it is for the op to compute or to say what is wrong.
#define DS_KERNELS_ONE_TENSOR(optimizer, lists, numbers)                                  \
  namespace ds_kernels::cpu {                                                             \
  static bool optimizer##_update(const OneTensor<lists, numbers>& one);                   \
  }                                                                                       \
  DS_KERNELS_PYTHON_FUNCTION(optimizer) {                                                 \
    const OneTensor<lists, numbers> one(arguments);                                       \
    return one.understood() && optimizer##_update(one) ? 0 : -1;                          \
  }                                                                                       \
  static bool ds_kernels::cpu::optimizer##_update(const OneTensor<lists, numbers>& one)
