// An optimizer's update as a function of Python, beside the op: of one tensor, for which DeepSpeed's optimizers on the host
// call, or of lists of them.
//
//   // param, grad, exp_avg, or lists of them; lr, beta1, beta2, weight_decay
//   DS_KERNELS_OPTIMIZER_FUNCTION(lion, 3, 4) { return all.update("lion_", LionLists{all.tensors(), lion_step(...)}); }
#pragma once

#include <ds_kernels/multi_tensor.h>

#include "device.h"
#include "python_function.h"

namespace ds_kernels::cpu {

// A parameter, its gradient, and one state or two, as they lie in memory.
template <size_t Lists>
struct PlainTensors {
  void* data[Lists] = {};
  Dtype dtypes[Lists] = {};
  int64_t numel = 0;

  // Whether all are plain, and of shapes and dtypes that fit together.
  bool take(void* (&impls)[Lists]) {
    const Shape shape = tensor_of(impls[0]).sizes();
    for (size_t i = 0; i < Lists; ++i) {
      const TensorRef tensor = tensor_of(impls[i]);
      if (!is_plain(impls[i], dtypes[i]) || tensor.sizes() != shape) return false;
      if (i > 0 && dtypes[i] != dtypes[0] && dtypes[i] != Dtype::Float32) return false;
      data[i] = tensor.data();
      if (data[i] == nullptr) return false;
    }
    numel = tensor_of(impls[0]).numel();
    return dtypes[Lists - 1] == dtypes[2];
  }

  detail::Block block(size_t list, size_t tensor) const {
    const auto begin = reinterpret_cast<uintptr_t>(data[list]);
    return {begin, begin + numel * size_of(dtypes[list]), list, tensor};
  }
};

// What a call was given beside tensors, and whether it was understood.
template <size_t Numbers>
class OptimizerCall {
 public:
  // Whether all tensors are plain, in memory of their own, and of shapes and dtypes that fit together.
  bool understood() const { return understood_; }
  double number(size_t i) const { return numbers_[i]; }

  template <class Work>
  bool update(const char* op, const Work& work) const {
    const OtherThreads others;
    Device(0).run(op, work, work.tensors.dtypes[0]);
    return true;
  }

 protected:
  // Takes a tensor, or a list of them, for each of `impls`, and the numbers.
  template <class Impls, size_t Lists>
  static bool take(Arguments arguments, Impls (&impls)[Lists], double (&numbers)[Numbers]) {
    if (arguments.left() != Lists + Numbers) return false;
    for (Impls& each : impls) {
      if (!arguments.take(each)) return false;
    }
    for (double& number : numbers) {
      if (!arguments.take(number)) return false;
    }
    return true;
  }

  double numbers_[Numbers] = {};
  bool understood_ = false;
};

// A call with one parameter.
template <size_t Lists, size_t Numbers>
class OneTensor : public OptimizerCall<Numbers> {
 public:
  explicit OneTensor(const Arguments& arguments) {
    void* impls[Lists];
    this->understood_ = this->take(arguments, impls, this->numbers_) && plain_.take(impls) && apart();
  }

  TensorLists tensors() const { return {Lists, 1, &plain_.numel, plain_.data, plain_.dtypes}; }

 private:
  // Whether no two share memory.
  bool apart() const {
    for (size_t i = 0; i < Lists; ++i) {
      const detail::Block one = plain_.block(i, 0);
      for (size_t j = 0; j < i; ++j) {
        const detail::Block other = plain_.block(j, 0);
        if (one.begin < other.end && other.begin < one.end) return false;
      }
    }
    return true;
  }

  PlainTensors<Lists> plain_;
};

// A call with lists, which nobody else may change meanwhile. All tensors of a list have one dtype.
template <size_t Lists, size_t Numbers>
class ManyTensors : public OptimizerCall<Numbers> {
 public:
  explicit ManyTensors(const Arguments& arguments) {
    std::vector<void*> impls[Lists];
    this->understood_ = this->take(arguments, impls, this->numbers_) && fit(impls);
  }

  TensorLists tensors() const { return {Lists, numels_.size(), numels_.data(), data_.data(), dtypes_}; }

 private:
  bool fit(const std::vector<void*> (&impls)[Lists]) {
    const size_t size = impls[0].size();
    if (size == 0) return false;
    for (const auto& list : impls) {
      if (list.size() != size) return false;
    }
    numels_.resize(size);
    data_.resize(Lists * size);
    std::vector<std::vector<detail::Block>> blocks(Lists, std::vector<detail::Block>(size));
    for (size_t i = 0; i < size; ++i) {
      void* its[Lists];
      for (size_t list = 0; list < Lists; ++list) its[list] = impls[list][i];
      PlainTensors<Lists> plain;
      if (!plain.take(its)) return false;
      numels_[i] = plain.numel;
      for (size_t list = 0; list < Lists; ++list) {
        if (i == 0) dtypes_[list] = plain.dtypes[list];
        if (plain.dtypes[list] != dtypes_[list]) return false;
        data_[list * size + i] = plain.data[list];
        blocks[list][i] = plain.block(list, i);
      }
    }
    bool apart = true;
    detail::find_shared(
        blocks, [](size_t list) { return list != 1; },  // gradients are read
        [&](const detail::Block&, const detail::Block&) { apart = false; });
    return apart;
  }

  std::vector<int64_t> numels_;
  std::vector<void*> data_;  // list after list
  Dtype dtypes_[Lists] = {};
};

}  // namespace ds_kernels::cpu

// Gives 0; or -1 where nothing was written, and it is for the op to compute or to say what is wrong.
#define DS_KERNELS_OPTIMIZER_FUNCTION(optimizer, lists, numbers)                          \
  namespace ds_kernels::cpu {                                                             \
  template <class Tensors>                                                                \
  static bool optimizer##_update(const Tensors& all);                                     \
  }                                                                                       \
  DS_KERNELS_PYTHON_FUNCTION(optimizer) {                                                 \
    if (arguments.is_list()) {                                                            \
      const ManyTensors<lists, numbers> all(arguments);                                   \
      return all.understood() && optimizer##_update(all) ? 0 : -1;                        \
    }                                                                                     \
    const OneTensor<lists, numbers> one(arguments);                                       \
    return one.understood() && optimizer##_update(one) ? 0 : -1;                          \
  }                                                                                       \
  template <class Tensors>                                                                \
  static bool ds_kernels::cpu::optimizer##_update(const Tensors& all)
