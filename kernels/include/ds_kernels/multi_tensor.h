// The tensor lists of a multi-tensor op (an optimizer step), checked as a whole before anything is written.
#pragma once

#include <algorithm>
#include <initializer_list>

#include <ds_kernels/binding.h>
#include <ds_kernels/tensor_lists.h>

namespace ds_kernels {

// One list argument. The op reads every list; it writes those marked so.
struct ListArgument {
  const char* name;
  const TensorList& tensors;
  bool written;
};

namespace detail {

struct Dimension {
  int64_t stride, size;
};

// Dimensions of more than one element, the smallest stride first.
inline std::vector<Dimension> sorted_dimensions(Shape shape, Shape strides) {
  std::vector<Dimension> dimensions;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] <= 1) continue;
    size_t place = dimensions.size();
    while (place > 0 && dimensions[place - 1].stride > strides[i]) --place;
    dimensions.insert(dimensions.begin() + place, {strides[i], shape[i]});
  }
  return dimensions;
}

// Whether the elements fill one block of memory without gaps, in some order of the dimensions.
inline bool is_dense(Shape shape, Shape strides) {
  int64_t expected = 1;
  for (auto [stride, size] : sorted_dimensions(shape, strides)) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// Whether two indices may name one element, as in an expanded tensor.
inline bool may_overlap_itself(Shape shape, Shape strides) {
  for (const int64_t size : shape) {
    if (size == 0) return false;  // whatever its strides
  }
  int64_t last = 0;  // offset of the last element among the dimensions seen
  for (auto [stride, size] : sorted_dimensions(shape, strides)) {
    if (stride <= last) return true;
    last += stride * (size - 1);
  }
  return false;
}

// The memory from a tensor's first element to its last.
struct Memory {
  uintptr_t begin = 0, end = 0;

  bool meets(const Memory& other) const { return begin < other.end && other.begin < end; }
};

inline Memory memory_of(const Tensor& tensor) {
  const Shape sizes = tensor.sizes(), strides = tensor.strides();
  int64_t elements = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return {};
    elements += (sizes[i] - 1) * strides[i];
  }
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return {begin, begin + static_cast<size_t>(elements) * tensor.element_size()};
}

// The memory of one tensor without gaps.
struct Block {
  uintptr_t begin = 0, end = 0;
  size_t list = 0, tensor = 0;
};

// Calls `shared(one, other)` for two blocks of memory of all lists that share some, unless neither is in a list that
// `is_written(list)`. One sweep over the blocks in the order of their addresses, in which it leaves them.
template <class IsWritten, class Shared>
void find_shared(std::vector<std::vector<Block>>& lists, const IsWritten& is_written, const Shared& shared) {
  const auto by_address = [](const Block& a, const Block& b) { return a.begin < b.begin; };
  for (std::vector<Block>& blocks : lists) {
    // Tensors made one after the other mostly lie in order.
    if (!std::is_sorted(blocks.begin(), blocks.end(), by_address)) std::sort(blocks.begin(), blocks.end(), by_address);
  }
  std::vector<size_t> next(lists.size(), 0);
  Block furthest, written_furthest;  // of the blocks seen, those that reach furthest
  for (;;) {
    const Block* lowest = nullptr;
    for (size_t list = 0; list < lists.size(); ++list) {
      if (next[list] == lists[list].size()) continue;
      const Block& candidate = lists[list][next[list]];
      if (!lowest || candidate.begin < lowest->begin) lowest = &candidate;
    }
    if (!lowest) return;
    ++next[lowest->list];
    const bool written = is_written(lowest->list);
    const Block& before = written ? furthest : written_furthest;
    if (before.end > lowest->begin) return shared(before, *lowest);
    if (lowest->end > furthest.end) furthest = *lowest;
    if (written && lowest->end > written_furthest.end) written_furthest = *lowest;
  }
}

}  // namespace detail

// Lists of equal length; the tensors at one index have one shape; one list has one dtype; all are on one device; no
// tensor that is written overlaps itself or another. Otherwise the constructor fails, naming op and argument.
//
// Elements are reached through plain pointers, in an order that is the same in all lists. Where a layout does not
// allow that, the pointer is that of a contiguous copy, and write_back() copies it back.
class MultiTensor {
 public:
  MultiTensor(const char* op, std::initializer_list<ListArgument> lists)
      : op_(op), lists_(lists), size_(lists_[0].tensors.size()), numels_(size_), strided_(size_, false), data_(lists_.size() * size_) {
    for (size_t list = 0; list < lists_.size(); ++list) check_list(list);
    for (size_t tensor = 0; tensor < size_; ++tensor) {
      if (strided_[tensor]) check_strided(tensor);
    }
    check_overlaps();
    for (size_t tensor = 0; tensor < size_; ++tensor) {
      if (strided_[tensor]) copy_strided(tensor);
    }
  }

  // For lists of parameters, gradients and states, in this order: gradients and states have the parameters' dtype or
  // float32, and all states one.
  void check_dtypes() const { check_dtypes(lists_.size() - 2, false); }
  // The same for `states` lists of states. With `any_grads`, gradients of float32 parameters have any dtype; so have
  // lists behind the states.
  void check_dtypes(size_t states, bool any_grads) const {
    for (size_t list = any_grads && dtypes_[0] == Dtype::Float32 ? 2 : 1; list < 2 + states; ++list) {
      const Dtype dtype = dtypes_[list];
      DS_KERNELS_CHECK(dtype == dtypes_[0] || dtype == Dtype::Float32, op_, lists_[list].name, " are ", name_of(dtype),
                       "; expected ", name_of(dtypes_[0]), ", as ", lists_[0].name, ", or float32");
      DS_KERNELS_CHECK(list < 2 || dtype == dtypes_[2], op_, lists_[list].name, " are ", name_of(dtype),
                       "; expected ", name_of(dtypes_[2]), ", as ", lists_[2].name);
    }
  }

  const char* op() const { return op_; }
  size_t lists() const { return lists_.size(); }
  size_t size() const { return size_; }
  const std::vector<int64_t>& numels() const { return numels_; }
  Dtype dtype(size_t list) const { return dtypes_[list]; }
  bool is_float(size_t list) const { return dtypes_[list] == Dtype::Float32; }
  void* data(size_t list, size_t tensor) const { return data_[list * size_ + tensor]; }

  // What a device is asked to work on, valid as long as this.
  TensorLists tensors() const { return {lists_.size(), size_, numels_.data(), data_.data(), dtypes_.data()}; }

  // Copies what was computed in contiguous copies back to the caller's tensors.
  void write_back() {
    const NoGrad guard;
    for (auto& copy : copies_) {
      if (copy.written) torch::stable::copy_(copy.original, copy.contiguous);
    }
  }

 private:
  struct Copy {
    Tensor original, contiguous;
    bool written;
  };

  std::string label(size_t list, size_t tensor) const {
    return std::string(lists_[list].name) + '[' + std::to_string(tensor) + ']';
  }

  // Everything but what strides decide; notes where some tensor is not contiguous.
  void check_list(size_t list) {
    const auto& [name, tensors, written] = lists_[list];
    DS_KERNELS_CHECK(tensors.size() == size_, op_, name, " has ", tensors.size(), " tensors; expected ", size_,
                     ", as many as ", lists_[0].name);
    dtypes_.push_back(size_ == 0 ? Dtype::Float32 : dtype_of(op_, name, tensors[0]));
    if (size_ == 0) return;
    const int32_t dtype = tensors[0].dtype_code();
    const int32_t device_type = lists_[0].tensors[0].device_type(), device = lists_[0].tensors[0].device_index();
    for (size_t i = 0; i < size_; ++i) {
      const TensorRef tensor = tensors[i];
      DS_KERNELS_CHECK(tensor.dtype_code() == dtype, op_, label(list, i), " has another dtype than ", label(list, 0),
                       "; expected ", name_of(dtypes_[list]));
      DS_KERNELS_CHECK(tensor.device_type() == device_type && tensor.device_index() == device, op_, label(list, i),
                       " is on another device than ", label(0, 0), "; expected all tensors on one");
      const Shape shape = tensor.sizes();
      const Shape expected = lists_[0].tensors[i].sizes();
      DS_KERNELS_CHECK(shape == expected, op_, label(list, i), " has shape ", text_of(shape), "; expected ",
                       text_of(expected), ", that of ", label(0, i));
      if (list == 0) numels_[i] = tensor.numel();
      if (!tensor.is_contiguous()) strided_[i] = true;
      data_[list * size_ + i] = tensor.data();
    }
  }

  void check_strided(size_t tensor) const {
    for (size_t list = 0; list < lists_.size(); ++list) {
      const TensorRef t = lists_[list].tensors[tensor];
      DS_KERNELS_CHECK(!lists_[list].written || !detail::may_overlap_itself(t.sizes(), t.strides()), op_,
                       label(list, tensor),
                       " has elements that share memory (is it expanded?); expected one element at each index");
    }
  }

  bool is_dense(size_t list, size_t tensor) const {
    const TensorRef t = lists_[list].tensors[tensor];
    return t.is_contiguous() || detail::is_dense(t.sizes(), t.strides());
  }

  detail::Block block(size_t list, size_t tensor) const {
    const auto begin = reinterpret_cast<uintptr_t>(data(list, tensor));
    return {begin, begin + numels_[tensor] * size_of(dtypes_[list]), list, tensor};
  }

  // The blocks of one list; views with gaps are left out, because they can interleave without sharing an element.
  std::vector<detail::Block> blocks_of(size_t list) const {
    std::vector<detail::Block> blocks;
    blocks.reserve(size_);
    for (size_t tensor = 0; tensor < size_; ++tensor) {
      if (numels_[tensor] > 0 && (!strided_[tensor] || is_dense(list, tensor))) blocks.push_back(block(list, tensor));
    }
    return blocks;
  }

  // Refuses tensors that share memory when one of them is written.
  void check_overlaps() const {
    std::vector<std::vector<detail::Block>> blocks;
    for (size_t list = 0; list < lists_.size(); ++list) blocks.push_back(blocks_of(list));
    detail::find_shared(
        blocks, [&](size_t list) { return lists_[list].written; },
        [&](const detail::Block& one, const detail::Block& other) {
          fail(op_, {label(one.list, one.tensor), " and ", label(other.list, other.tensor),
                     " share memory; expected a tensor that is written to share none"});
        });
  }

  // Elements of tensors with equal strides and no gaps can be visited as they lie in memory; otherwise contiguous
  // copies take the place of the tensors that are not contiguous.
  void copy_strided(size_t tensor) {
    const Shape strides = lists_[0].tensors[tensor].strides();
    const bool as_they_lie = is_dense(0, tensor) && std::all_of(lists_.begin(), lists_.end(), [&](const auto& list) {
      return list.tensors[tensor].strides() == strides;
    });
    if (as_they_lie) return;
    const NoGrad guard;
    for (size_t list = 0; list < lists_.size(); ++list) {
      const TensorRef t = lists_[list].tensors[tensor];
      if (t.is_contiguous()) continue;
      copies_.push_back({t.tensor(), torch::stable::contiguous(t.tensor()), lists_[list].written});
      data_[list * size_ + tensor] = copies_.back().contiguous.data_ptr();
    }
  }

  const char* op_;
  std::vector<ListArgument> lists_;
  size_t size_;
  std::vector<int64_t> numels_;
  std::vector<char> strided_;  // whether some tensor at an index is not contiguous
  std::vector<void*> data_;    // list after list
  std::vector<Dtype> dtypes_;
  std::vector<Copy> copies_;
};

// The constants of steps_of() as a device is given them, valid as long as `steps`.
template <class Step>
Steps<Step> steps_for(const std::vector<Step>& steps) {
  return {steps.data(), steps.size() > 1};
}

// What `constants_of` makes of each step number; there is one for all tensors, or one each. Equal numbers in a row are
// computed once.
template <class ConstantsOf>
auto steps_of(const char* op, const std::vector<int64_t>& steps, size_t tensors, const ConstantsOf& constants_of) {
  DS_KERNELS_CHECK(steps.size() == 1 || steps.size() == tensors, op, "steps has ", steps.size(),
                   " entries; expected 1, or one per tensor (", tensors, ")");
  std::vector<decltype(constants_of(int64_t{}))> result;
  result.reserve(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    DS_KERNELS_CHECK(steps[i] >= 1, op, "steps has an entry ", steps[i],
                     "; expected at least 1: the first update is step 1");
    result.push_back(i > 0 && steps[i] == steps[i - 1] ? result.back() : constants_of(steps[i]));
  }
  return result;
}

}  // namespace ds_kernels
