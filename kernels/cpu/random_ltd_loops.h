// What the loops of random_ltd.cpp offer to random_ltd_binding.cpp.
#pragma once

#include <ds_kernels/random_ltd.h>

namespace ds_kernels::cpu {

struct RandomLTDLoops {
  // Whether all of `count` indices are at least 0 and less than `limit`.
  bool (*within)(const int32_t* indices, int64_t count, int64_t limit);

  // Sorts one row in place. `seen` has a zero for each token of the sequence, before and after.
  void (*sort)(int32_t* indices, int64_t count, int32_t* seen, int64_t seq_len);

  // Copies chosen tokens out of all of them: those number [first, last) of batch * reserved.
  void (*gather)(const TokenMove& move, int64_t first, int64_t last);

  // Copies bytes [begin, end) of each chosen token of one sequence to its place, in the order of the indices.
  void (*scatter)(const TokenMove& move, int64_t sequence, int64_t begin, int64_t end);

  // Output rows [first, last) of layers * batch * reserved, for elements of 1, 2, 4 or 8 bytes; null for others.
  void (*(*mask)(int64_t element_size))(const MaskGather& gather, int64_t first, int64_t last);
};

}  // namespace ds_kernels::cpu
