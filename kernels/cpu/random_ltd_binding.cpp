// ds_plugin::token_sort_, token_gather, token_scatter_ and mask_gather_bert for tensors in host memory.
#include "random_ltd_loops.h"

#include <ds_kernels/arguments.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(RandomLTDLoops, random_ltd_loops)

namespace {

constexpr int64_t kBytesPerShare = 64 * 1024;

// Shares of things of `bytes` bytes each that are worth waking a thread for.
int64_t grain(int64_t bytes) { return std::max<int64_t>(1, kBytesPerShare / std::max<int64_t>(bytes, 1)); }

void check_same_device(const char* op, const char* name, const Tensor& tensor, const char* first) {
  DS_KERNELS_CHECK(tensor.is_cpu(), op, name, " is on another device than ", first,
                   "; expected all tensors on one");
}

void check_int32(const char* op, const Tensor& indices) {
  DS_KERNELS_CHECK(TensorRef(indices.get()).dtype_code() == aoti_torch_dtype_int32(), op,
                   "indices have another dtype; expected int32");
}

// Token indices: int32, on the host, each less than `limit`; contiguous.
Tensor checked_indices(const char* op, const Tensor& indices, int64_t dimensions, const char* first) {
  check_int32(op, indices);
  check_same_device(op, "indices", indices, first);
  DS_KERNELS_CHECK(indices.dim() == dimensions, op, "indices has ", indices.dim(), " dimensions; expected ",
                   dimensions);
  return without_gaps(indices);
}

void check_range(const char* op, const Tensor& indices, int64_t limit) {
  const bool within = loops_for(op, all_random_ltd_loops())
                          .within(static_cast<const int32_t*>(indices.data_ptr()), indices.numel(), limit);
  DS_KERNELS_CHECK(within, op, "indices has an entry that is no token; expected at least 0 and less than ", limit);
}

void check_no_self_overlap(const char* op, const char* name, const Tensor& tensor) {
  DS_KERNELS_CHECK(!detail::may_overlap_itself(tensor.sizes(), tensor.strides()), op, name,
                   "[0] has elements that share memory (is it expanded?); expected one element at each index");
}

void token_sort_(const Tensor& indices, int64_t seq_len) {
  const char* op = "token_sort_";
  check_int32(op, indices);
  DS_KERNELS_CHECK(indices.dim() > 0, op, "indices has no dimensions; expected [..., reserved]");
  check_no_self_overlap(op, "indices", indices);
  const Tensor rows = without_gaps(indices);
  check_range(op, rows, seq_len);
  const int64_t reserved = indices.size(indices.dim() - 1);
  if (reserved == 0 || indices.numel() == 0) return;
  const auto sort = loops_for(op, all_random_ltd_loops()).sort;
  auto* data = static_cast<int32_t*>(rows.data_ptr());
  parallel_for(0, indices.numel() / reserved, grain(4 * (seq_len + reserved)), [&](int64_t first, int64_t last) {
    std::vector<int32_t> seen(seq_len);
    for (int64_t row = first; row < last; ++row) sort(data + row * reserved, reserved, seen.data(), seq_len);
  });
  if (!indices.is_contiguous()) {
    const NoGrad guard;
    Tensor target = indices;
    torch::stable::copy_(target, rows);
  }
}

struct Batch {
  int64_t sequences, tokens, channels;
};

Batch checked_batch(const char* op, const char* name, const Tensor& activations, const Tensor& indices,
                    bool batch_first) {
  DS_KERNELS_CHECK(activations.dim() == 3, op, name, " has ", activations.dim(), " dimensions; expected 3");
  const Batch batch{activations.size(batch_first ? 0 : 1), activations.size(batch_first ? 1 : 0), activations.size(2)};
  DS_KERNELS_CHECK(indices.size(0) == batch.sequences, op, "indices has ", indices.size(0), " rows; expected ",
                   batch.sequences, ", one for each sequence of ", name);
  return batch;
}

// The tokens of a contiguous tensor.
Tokens tokens_of(const Tensor& tensor, bool batch_first) {
  const int64_t size = static_cast<int64_t>(tensor.element_size()), channels = tensor.size(2);
  const int64_t outer = tensor.size(1) * channels * size, inner = channels * size;
  return {static_cast<char*>(tensor.data_ptr()), batch_first ? outer : inner, batch_first ? inner : outer};
}

TokenMove move_of(const Tensor& all, const Tensor& chosen, const Tensor& indices, bool batch_first) {
  return {tokens_of(all, batch_first),
          tokens_of(chosen, batch_first),
          static_cast<const int32_t*>(indices.data_ptr()),
          indices.size(0),
          indices.size(1),
          all.size(2) * static_cast<int64_t>(all.element_size())};
}

Tensor token_gather(const Tensor& activations, const Tensor& indices, bool batch_first) {
  const char* op = "token_gather";
  const Tensor places = checked_indices(op, indices, 2, "activations");
  const Batch batch = checked_batch(op, "activations", activations, places, batch_first);
  check_range(op, places, batch.tokens);
  const int64_t reserved = places.size(1);
  const int64_t shape[] = {batch_first ? batch.sequences : reserved, batch_first ? reserved : batch.sequences,
                           batch.channels};
  Tensor output = new_tensor(activations, {shape, 3});
  const Tensor all = without_gaps(activations);
  const TokenMove move = move_of(all, output, places, batch_first);
  const auto gather = loops_for(op, all_random_ltd_loops()).gather;
  parallel_for(0, batch.sequences * reserved, grain(move.bytes),
               [&](int64_t first, int64_t last) { gather(move, first, last); });
  return output;
}

void check_apart(const char* op, const Tensor& all, const Tensor& chosen) {
  if (!all.is_contiguous() || !chosen.is_contiguous() || all.numel() == 0 || chosen.numel() == 0) return;
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()); };
  const auto end = [&](const Tensor& t) { return begin(t) + t.numel() * t.element_size(); };
  DS_KERNELS_CHECK(end(all) <= begin(chosen) || end(chosen) <= begin(all), op,
                   "all_activations[0] and layer_activations[0] share memory; expected a tensor that is written to "
                   "share none");
}

void token_scatter_(const Tensor& all_activations, const Tensor& layer_activations, const Tensor& indices,
                    bool batch_first) {
  const char* op = "token_scatter_";
  const Tensor places = checked_indices(op, indices, 2, "all_activations");
  const Batch batch = checked_batch(op, "all_activations", all_activations, places, batch_first);
  check_same_device(op, "layer_activations", layer_activations, "all_activations");
  DS_KERNELS_CHECK(TensorRef(layer_activations.get()).dtype_code() == TensorRef(all_activations.get()).dtype_code(), op,
                   "layer_activations have another dtype; expected that of all_activations");
  const int64_t reserved = places.size(1);
  const int64_t expected[] = {batch_first ? batch.sequences : reserved, batch_first ? reserved : batch.sequences,
                              batch.channels};
  DS_KERNELS_CHECK(layer_activations.sizes() == Shape(expected, 3), op, "layer_activations has shape ",
                   text_of(layer_activations.sizes()), "; expected ", text_of(Shape(expected, 3)));
  check_no_self_overlap(op, "all_activations", all_activations);
  check_apart(op, all_activations, layer_activations);
  check_range(op, places, batch.tokens);
  const Tensor all = without_gaps(all_activations), chosen = without_gaps(layer_activations);
  const TokenMove move = move_of(all, chosen, places, batch_first);
  const auto scatter = loops_for(op, all_random_ltd_loops()).scatter;
  // Shares are columns of one sequence: where an index repeats, one thread writes both, and the last one wins.
  const int64_t columns = std::max<int64_t>(1, move.bytes / 512);
  const int64_t width = (move.bytes + columns - 1) / columns;
  parallel_for(0, batch.sequences * columns, grain(width * reserved), [&](int64_t first, int64_t last) {
    for (int64_t sequence = first / columns; first < last; ++sequence) {
      const int64_t stop = std::min(last, (sequence + 1) * columns);
      const int64_t begin = (first - sequence * columns) * width, end = (stop - sequence * columns) * width;
      scatter(move, sequence, std::min(begin, move.bytes), std::min(end, move.bytes));
      first = stop;
    }
  });
  if (!all_activations.is_contiguous()) {
    const NoGrad guard;
    Tensor target = all_activations;
    torch::stable::copy_(target, all);
  }
}

Tensor mask_gather_bert(const Tensor& mask, const Tensor& indices) {
  const char* op = "mask_gather_bert";
  DS_KERNELS_CHECK(mask.dim() == 4 && mask.size(1) == 1 && mask.size(2) == mask.size(3), op, "mask has shape ",
                   text_of(mask.sizes()), "; expected [batch, 1, sequence, sequence]");
  const Tensor places = checked_indices(op, indices, 3, "mask");
  const int64_t layers = places.size(0), batch = mask.size(0), reserved = places.size(2);
  DS_KERNELS_CHECK(places.size(1) == batch, op, "indices has shape ", text_of(places.sizes()),
                   "; expected [layers, ", batch, ", reserved], as mask");
  check_range(op, places, mask.size(3));
  const int64_t shape[] = {layers, batch, 1, reserved, reserved};
  Tensor output = new_tensor(mask, {shape, 5});
  const Tensor from = without_gaps(mask);
  const auto gather = loops_for(op, all_random_ltd_loops()).mask(static_cast<int64_t>(mask.element_size()));
  DS_KERNELS_CHECK(gather, op, "mask has elements of ", mask.element_size(), " bytes; expected 1, 2, 4 or 8");
  const MaskGather work{static_cast<const char*>(from.data_ptr()), static_cast<const int32_t*>(places.data_ptr()),
                        static_cast<char*>(output.data_ptr()), batch, mask.size(3), reserved};
  parallel_for(0, layers * batch * reserved, grain(reserved * static_cast<int64_t>(mask.element_size())),
               [&](int64_t first, int64_t last) { gather(work, first, last); });
  return output;
}

}  // namespace

// mask_gather_gpt is a copy of a corner, which torch's own copy does as well as any loop: it has no kernel here.
DS_KERNELS_IMPL(CPU, m) {
  m.impl("token_sort_", TORCH_BOX(&token_sort_));
  m.impl("token_gather", TORCH_BOX(&token_gather));
  m.impl("token_scatter_", TORCH_BOX(&token_scatter_));
  m.impl("mask_gather_bert", TORCH_BOX(&mask_gather_bert));
}

}  // namespace ds_kernels::cpu
