// What the loop of all_reduce.cpp offers to all_reduce_binding.cpp.
#pragma once

#include <ds_kernels/config.h>

namespace ds_kernels::cpu {

// A piece to add up: `elements` of each of `ranks` slots, in their order, into `output`, which may be one of them.
struct SlotSum {
  void* output;
  const void* const* slots;
  int64_t ranks, elements;
};

struct AllReduceLoops {
  void (*(*sum)(Dtype))(const SlotSum& work);
};

}  // namespace ds_kernels::cpu
