// An optimizer's update of one tensor as a C function, beside the op that takes lists: DeepSpeed's optimizers on the
// host call for each parameter, and torch's dispatcher takes several times as long as the update of a small one.
//
//   DS_KERNELS_ONE_TENSOR(lion) { one.update("lion_", LionLists{one.tensors(), lion_step(...)}); }
//
// defines ds_kernels_lion_update(), which ds_plugin_sdk.ops._one_tensor calls.
#pragma once

#include "device.h"
#include "plain_tensor.h"

namespace ds_kernels::cpu {

// A parameter, its gradient, and one state or two.
class OneTensor {
 public:
  // `impls` are at::TensorImpl*, the last may be null.
  OneTensor(void* const (&impls)[4], int64_t step, const double* numbers) : numbers_(numbers), step_(step) {
    for (; lists_ < 4 && impls[lists_]; ++lists_) impls_[lists_] = impls[lists_];
  }

  // Whether all are plain, in memory of their own, and of shapes and dtypes that fit together.
  bool understood() {
    for (size_t i = 0; i < lists_; ++i) {
      if (!is_plain(impls_[i], dtypes_[i]) || at(i).sizes() != at(0).sizes()) return false;
      data_[i] = at(i).data();
    }
    numel_ = at(0).numel();
    for (size_t i = 1; i < lists_; ++i) {
      if (dtypes_[i] != dtypes_[0] && dtypes_[i] != Dtype::Float32) return false;
    }
    return step_ >= 1 && dtypes_[lists_ - 1] == dtypes_[2] && apart();
  }

  const double* numbers() const { return numbers_; }  // the op's, in the order of its schema
  int64_t step() const { return step_; }
  TensorLists tensors() const { return {lists_, 1, &numel_, data_, dtypes_}; }

  template <class Work>
  void update(const char* op, const Work& work) const {
    Device(0).run(op, work, dtypes_[0]);
  }

 private:
  TensorRef at(size_t list) { return tensor_of(impls_[list]); }

  // Whether no two share memory.
  bool apart() const {
    for (size_t i = 0; i < lists_; ++i) {
      const auto begin = reinterpret_cast<uintptr_t>(data_[i]), end = begin + numel_ * size_of(dtypes_[i]);
      if (begin == 0) return false;
      for (size_t j = 0; j < i; ++j) {
        const auto other = reinterpret_cast<uintptr_t>(data_[j]);
        if (begin < other + numel_ * size_of(dtypes_[j]) && other < end) return false;
      }
    }
    return true;
  }

  const double* numbers_;
  int64_t step_, numel_ = 0;
  size_t lists_ = 0;
  void* impls_[4] = {};
  void* data_[4] = {};
  Dtype dtypes_[4] = {};
};

}  // namespace ds_kernels::cpu

// `numbers` are the op's other arguments. Gives 1; or 0 where nothing was written, and it is for the op to compute or to
// say what is wrong.
#define DS_KERNELS_ONE_TENSOR(optimizer)                                                                         \
  namespace ds_kernels::cpu {                                                                                    \
  static void optimizer##_one(const OneTensor& one);                                                             \
  }                                                                                                              \
  extern "C" __attribute__((visibility("default"))) int32_t ds_kernels_##optimizer##_update(                     \
      void* param, void* grad, void* first, void* second, int64_t step, const double* numbers) {                 \
    try {                                                                                                        \
      ds_kernels::cpu::OneTensor one({param, grad, first, second}, step, numbers);                               \
      if (!one.understood()) return 0;                                                                           \
      ds_kernels::cpu::optimizer##_one(one);                                                                     \
      return 1;                                                                                                  \
    } catch (const std::exception&) {                                                                            \
      return 0;                                                                                                  \
    }                                                                                                            \
  }                                                                                                              \
  static void ds_kernels::cpu::optimizer##_one(const OneTensor& one)
