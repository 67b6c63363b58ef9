// ds_plugin::all_reduce_: sums over the ranks of a machine, through memory that they share.
#include "all_reduce_loops.h"

#include <ds_kernels/arguments.h>

#include "device.h"
#include "python_function.h"
#include "shared_ranks.h"

namespace ds_kernels::cpu {

// What a rank shares with the others; ds_plugin_sdk.ops.all_reduce fills it in.
struct SharedMemory {
  void* base;
  int64_t size, rank, ranks;
  double patience;
};

namespace {

int64_t add_up(SharedRanks& memory, const SharedMemory& shared, void* data, int64_t elements, Dtype dtype, int64_t start) {
  const int64_t element = size_of(dtype);
  const auto sum = loops_for<AllReduceLoops>("all_reduce_").sum(dtype);
  const int64_t end = memory.all_reduce(
      static_cast<char*>(data), elements * element, static_cast<int64_t>(dtype), start * element, shared.patience,
      [&](void* output, const void* const* slots, int64_t bytes) { sum({output, slots, shared.ranks, bytes / element}); });
  return end / element;
}

int64_t all_reduce_(const Tensor& self, const Tensor& shared, int64_t rank, int64_t ranks, int64_t start,
                    double patience) {
  const char* op = "all_reduce_";
  const Dtype dtype = dtype_of(op, "self", TensorRef(self.get()));
  DS_KERNELS_CHECK(self.is_contiguous(), op, "self is not contiguous");
  DS_KERNELS_CHECK(shared.is_contiguous(), op, "shared is not contiguous");
  DS_KERNELS_CHECK(0 <= rank && rank < ranks, op, "rank is ", rank, "; expected one of ", ranks);
  SharedRanks memory(shared.data_ptr(), shared.numel() * shared.element_size(), rank, ranks);
  DS_KERNELS_CHECK(memory.slot_bytes() > 0, op, "shared has no room for ", ranks, " ranks");
  const int64_t end = add_up(memory, {nullptr, 0, rank, ranks, patience}, self.data_ptr(), self.numel(), dtype, start);
  DS_KERNELS_CHECK(memory.other() < 0 || memory.dtype_of(memory.other()) == memory.dtype_of(rank), op, "rank ",
                   memory.other(), " adds up ", name_of(static_cast<Dtype>(memory.dtype_of(memory.other()))),
                   " where this rank adds up ", name_of(dtype), "; expected the same of all");
  DS_KERNELS_CHECK(memory.other() < 0, op, "rank ", memory.other(), " has ", memory.bytes_of(memory.other()),
                   " bytes to add up where this rank has ", memory.bytes_of(rank), "; expected as many of all");
  return end;
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) { m.impl("all_reduce_", TORCH_BOX(&all_reduce_)); }

}  // namespace ds_kernels::cpu

// tensor, the address of a SharedMemory, start: what the op gives; or -1 where it is for the op to compute or to say what
// is wrong.
DS_KERNELS_PYTHON_FUNCTION(all_reduce) {
  void* impl;
  int64_t address, start;
  ds_kernels::Dtype dtype;
  if (arguments.left() != 3 || !arguments.take(impl) || !arguments.take(address) || !arguments.take(start)) return -1;
  if (!is_plain(impl, dtype)) return -1;
  const auto& shared = *reinterpret_cast<const SharedMemory*>(address);
  SharedRanks memory(shared.base, shared.size, shared.rank, shared.ranks);
  const auto tensor = tensor_of(impl);
  const OtherThreads others;
  const int64_t end = add_up(memory, shared, tensor.data(), tensor.numel(), dtype, start);
  return memory.other() < 0 ? end : -1;
}
