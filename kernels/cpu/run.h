// Runs loops on torch's threads: over rows, or over all elements of a multi-tensor op.
#pragma once

#include <ds_kernels/multi_tensor.h>
#include <ds_kernels/slices.h>

#include "levels.h"

namespace ds_kernels::cpu {

// The host as a device of <ds_kernels/ops/...>: there is one, and it is always current.
struct Host {
  explicit Host(int32_t) {}
};

// How many elements make a share that is worth waking a thread for.
constexpr int64_t kElementsPerShare = 16 * 1024;

// Rows of `columns` elements that make such a share.
inline int64_t row_grain(int64_t columns) {
  return std::max<int64_t>(1, kElementsPerShare / std::max<int64_t>(columns, 1));
}

// Below this many units of work a thread costs more to wake than it saves.
constexpr int64_t kGrain = 16;

// The table of loops for this machine; fails, naming the op, if the binary has none.
template <class Table, size_t levels>
const Table& loops_for(const char* op, const Built<Table> (&built)[levels]) {
  static const Table* const table = best(built);
  DS_KERNELS_CHECK(table, op, "this binary has no code for this CPU; expected a build on a machine of its kind");
  return *table;
}

// Calls `body(at, tensor, count)` for slices of `count` elements of one tensor; `at[list]` is where the slice begins in
// each list.
template <size_t lists, class Body>
void run(const MultiTensor& tensors, const Body& body) {
  const Slices slices(tensors.numels());
  parallel_for(0, slices.units(), kGrain, [&](int64_t first, int64_t last) {
    slices.visit(first, last, [&](size_t tensor, int64_t begin, int64_t end) {
      void* at[lists];
      for (size_t list = 0; list < lists; ++list) {
        at[list] = static_cast<char*>(tensors.data(list, tensor)) + begin * size_of(tensors.dtype(list));
      }
      body(at, tensor, end - begin);
    });
  });
}

}  // namespace ds_kernels::cpu
