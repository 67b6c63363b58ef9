// How a loop over rows is shared among threads. The arguments themselves are checked in <ds_kernels/arguments.h>.
#pragma once

#include <ds_kernels/arguments.h>

namespace ds_kernels::cpu {

// How many elements make a share that is worth waking a thread for.
constexpr int64_t kElementsPerShare = 16 * 1024;

// Rows of `columns` elements that make such a share.
inline int64_t row_grain(int64_t columns) {
  return std::max<int64_t>(1, kElementsPerShare / std::max<int64_t>(columns, 1));
}

}  // namespace ds_kernels::cpu
