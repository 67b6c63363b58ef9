// ds_plugin::all_reduce_, all_gather_ and reduce_scatter_: among the ranks of a machine, through memory that they share.
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

// What is done with tensors: a kind of `SharedRanks` is one of these and a dtype.
enum Collective : int64_t { kAllReduce, kAllGather, kReduceScatter };
constexpr const char* kNames[] = {"all_reduce_", "all_gather_", "reduce_scatter_"};
constexpr int64_t kDtypes = 256;
// Of the function for Python: the call is for the op; another rank does not do the same, which the op says if it starts so.
constexpr int64_t kForTheOp = -1, kSayWhatIsWrong = -2;

int64_t kind(Collective collective, Dtype dtype = {}) { return collective * kDtypes + static_cast<int64_t>(dtype); }

auto adding(Dtype dtype, int64_t ranks) {
  const auto sum = loops_for<AllReduceLoops>("all_reduce_").sum(dtype);
  return [=](void* output, const void* const* slots, int64_t bytes) {
    sum({output, slots, ranks, bytes / size_of(dtype)});
  };
}

int64_t add_up(SharedRanks& memory, const SharedMemory& shared, void* data, int64_t elements, Dtype dtype, int64_t start) {
  const int64_t element = size_of(dtype);
  const int64_t end = memory.all_reduce(static_cast<char*>(data), elements * element, kind(kAllReduce, dtype),
                                        start * element, shared.patience, adding(dtype, shared.ranks));
  return end / element;
}

SharedRanks ranks_of(const char* op, const Tensor& shared, int64_t rank, int64_t ranks, int64_t pieces = 1) {
  DS_KERNELS_CHECK(shared.is_contiguous(), op, "shared is not contiguous");
  DS_KERNELS_CHECK(0 <= rank && rank < ranks, op, "rank is ", rank, "; expected one of ", ranks);
  const SharedRanks memory(shared.data_ptr(), shared.numel() * shared.element_size(), rank, ranks);
  DS_KERNELS_CHECK(memory.has_room(pieces), op, "shared has no room for ", ranks, " ranks");
  return memory;
}

// Whether all ranks do the same, with as much of the same dtype.
void check_others(const char* op, const SharedRanks& memory, int64_t rank) {
  const int64_t other = memory.other();
  if (other < 0) return;
  const int64_t theirs = memory.kind_of(other), ours = memory.kind_of(rank);
  DS_KERNELS_CHECK(theirs / kDtypes == ours / kDtypes, op, "rank ", other, " is in ", kNames[theirs / kDtypes],
                   "; expected the same of all");
  DS_KERNELS_CHECK(theirs == ours, op, "rank ", other, " adds up ", name_of(static_cast<Dtype>(theirs % kDtypes)),
                   " where this rank adds up ", name_of(static_cast<Dtype>(ours % kDtypes)), "; expected the same of all");
  DS_KERNELS_CHECK(false, op, "rank ", other, " has ", memory.bytes_of(other), " bytes left where this rank has ",
                   memory.bytes_of(rank), "; expected as many of all");
}

void check_start(const char* op, int64_t start) {
  DS_KERNELS_CHECK(start >= 0, op, "start is ", start, "; expected an element, from 0");
}

int64_t all_reduce_(const Tensor& self, const Tensor& shared, int64_t rank, int64_t ranks, int64_t start,
                    double patience) {
  const char* op = "all_reduce_";
  const Dtype dtype = dtype_of(op, "self", TensorRef(self.get()));
  DS_KERNELS_CHECK(self.is_contiguous(), op, "self is not contiguous");
  SharedRanks memory = ranks_of(op, shared, rank, ranks);
  if (start == kSayWhatIsWrong) {
    memory.look_again();
    check_others(op, memory, rank);
  }
  check_start(op, start);
  const int64_t end = add_up(memory, {nullptr, 0, rank, ranks, patience}, self.data_ptr(), self.numel(), dtype, start);
  check_others(op, memory, rank);
  return end;
}

// `parts` is as large as `part` of all ranks together.
void check_parts(const char* op, const Tensor& parts, const Tensor& part, int64_t ranks) {
  DS_KERNELS_CHECK(parts.is_contiguous() && part.is_contiguous(), op, "a tensor is not contiguous");
  const int64_t element = part.element_size();
  DS_KERNELS_CHECK(parts.element_size() == element && parts.numel() == ranks * part.numel(), op, "tensors have ",
                   parts.numel() * parts.element_size(), " and ", part.numel() * element, " bytes; expected one ", ranks,
                   " times as large as the other");
}

int64_t all_gather_(const Tensor& output, const Tensor& input, const Tensor& shared, int64_t rank, int64_t ranks,
                    int64_t start, double patience) {
  const char* op = "all_gather_";
  SharedRanks memory = ranks_of(op, shared, rank, ranks);
  check_parts(op, output, input, ranks);
  check_start(op, start);
  const int64_t element = input.element_size();
  const int64_t end = memory.all_gather(static_cast<char*>(output.data_ptr()), static_cast<const char*>(input.data_ptr()),
                                        input.numel() * element, kind(kAllGather), start * element, patience);
  check_others(op, memory, rank);
  return end / element;
}

int64_t reduce_scatter_(const Tensor& output, const Tensor& input, const Tensor& shared, int64_t rank, int64_t ranks,
                        int64_t start, double patience) {
  const char* op = "reduce_scatter_";
  const Dtype dtype = dtype_of(op, "input", TensorRef(input.get()));
  DS_KERNELS_CHECK(dtype == dtype_of(op, "output", TensorRef(output.get())), op, "output has another dtype than input");
  SharedRanks memory = ranks_of(op, shared, rank, ranks, ranks);
  check_parts(op, input, output, ranks);
  check_start(op, start);
  const int64_t element = size_of(dtype);
  const int64_t end = memory.reduce_scatter(
      static_cast<char*>(output.data_ptr()), static_cast<const char*>(input.data_ptr()), output.numel() * element,
      kind(kReduceScatter, dtype), start * element, patience, adding(dtype, ranks));
  check_others(op, memory, rank);
  return end / element;
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) {
  m.impl("all_reduce_", TORCH_BOX(&all_reduce_));
  m.impl("all_gather_", TORCH_BOX(&all_gather_));
  m.impl("reduce_scatter_", TORCH_BOX(&reduce_scatter_));
}

}  // namespace ds_kernels::cpu

// tensor, the address of a SharedMemory, start: what the op gives, or one of the two above.
DS_KERNELS_PYTHON_FUNCTION(all_reduce) {
  void* impl;
  int64_t address, start;
  ds_kernels::Dtype dtype;
  if (arguments.left() != 3) return kForTheOp;
  if (!arguments.take(impl) || !arguments.take(address) || !arguments.take(start)) return kForTheOp;
  if (!is_plain(impl, dtype)) return kForTheOp;
  const auto& shared = *reinterpret_cast<const SharedMemory*>(address);
  SharedRanks memory(shared.base, shared.size, shared.rank, shared.ranks);
  const auto tensor = tensor_of(impl);
  const OtherThreads others;
  const int64_t end = add_up(memory, shared, tensor.data(), tensor.numel(), dtype, start);
  return memory.other() < 0 ? end : kSayWhatIsWrong;
}
