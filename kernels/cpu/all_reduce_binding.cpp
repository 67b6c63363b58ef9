// ds_plugin::all_reduce_: sums over the ranks of a machine, through memory that they share.
#include "all_reduce_loops.h"

#include <ds_kernels/arguments.h>

#include "device.h"
#include "shared_ranks.h"

namespace ds_kernels::cpu {

namespace {

int64_t all_reduce_(const Tensor& self, const Tensor& shared, int64_t rank, int64_t ranks, int64_t start,
                    double patience) {
  const char* op = "all_reduce_";
  const Dtype dtype = dtype_of(op, "self", TensorRef(self.get()));
  const int64_t element = size_of(dtype);
  DS_KERNELS_CHECK(self.is_contiguous(), op, "self is not contiguous");
  DS_KERNELS_CHECK(shared.is_contiguous(), op, "shared is not contiguous");
  DS_KERNELS_CHECK(0 <= rank && rank < ranks, op, "rank is ", rank, "; expected one of ", ranks);
  SharedRanks memory(shared.data_ptr(), shared.numel() * shared.element_size(), rank, ranks);
  DS_KERNELS_CHECK(memory.slot_bytes() > 0, op, "shared has no room for ", ranks, " ranks");
  const auto sum = loops_for<AllReduceLoops>(op).sum(dtype);
  const int64_t end = memory.all_reduce(
      static_cast<char*>(self.data_ptr()), self.numel() * element, static_cast<int64_t>(dtype), start * element, patience,
      [&](void* output, const void* const* slots, int64_t bytes) { sum({output, slots, ranks, bytes / element}); });
  DS_KERNELS_CHECK(memory.other() < 0 || memory.dtype_of(memory.other()) == memory.dtype_of(rank), op, "rank ",
                   memory.other(), " adds up ", name_of(static_cast<Dtype>(memory.dtype_of(memory.other()))),
                   " where this rank adds up ", name_of(dtype), "; expected the same of all");
  DS_KERNELS_CHECK(memory.other() < 0, op, "rank ", memory.other(), " has ", memory.bytes_of(memory.other()),
                   " bytes to add up where this rank has ", memory.bytes_of(rank), "; expected as many of all");
  return end / element;
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) { m.impl("all_reduce_", TORCH_BOX(&all_reduce_)); }

}  // namespace ds_kernels::cpu
