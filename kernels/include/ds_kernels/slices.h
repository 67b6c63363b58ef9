// Shares the elements of many tensors among threads. No torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ds_kernels {

// The elements of all tensors, cut into units of at most kUnit elements of one tensor. A thread takes a contiguous run
// of units: threads get equal shares however the sizes differ, and one tensor's part in a share is one slice.
class Slices {
 public:
  static constexpr int64_t kUnit = 1024;

  explicit Slices(const std::vector<int64_t>& numels) : Slices(numels.data(), numels.size()) {}
  Slices(const int64_t* numels, size_t tensors) : numels_(numels), first_unit_(tensors + 1, 0) {
    for (size_t tensor = 0; tensor < tensors; ++tensor) {
      first_unit_[tensor + 1] = first_unit_[tensor] + (numels[tensor] + kUnit - 1) / kUnit;
    }
  }

  int64_t units() const { return first_unit_.back(); }

  // The number of the first unit of `tensor`; of the one behind the last tensor, units().
  int64_t first_unit(size_t tensor) const { return first_unit_[tensor]; }

  // Calls `body(tensor, begin, end)` for the slices that units [first, last) consist of.
  template <class Body>
  void visit(int64_t first, int64_t last, Body body) const {
    auto next = std::upper_bound(first_unit_.begin(), first_unit_.end(), first);
    for (auto tensor = static_cast<size_t>(next - first_unit_.begin()) - 1; first < last; ++tensor) {
      const int64_t stop = std::min(last, first_unit_[tensor + 1]);
      if (first == stop) continue;  // an empty tensor
      body(tensor, (first - first_unit_[tensor]) * kUnit,
           std::min((stop - first_unit_[tensor]) * kUnit, numels_[tensor]));
      first = stop;
    }
  }

 private:
  const int64_t* numels_;
  std::vector<int64_t> first_unit_;
};

}  // namespace ds_kernels
