// ds_plugin::token_sort_, token_gather, token_scatter_ and mask_gather_bert, on any device.
#pragma once

#include <ds_kernels/arguments.h>
#include <ds_kernels/random_ltd.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for TokenCheck, TokenRows, TokenGather, TokenScatter and MaskGather.
template <class Device>
struct RandomLTDOps {
  // mask_gather_gpt is a copy of a corner, which torch's own copy does as well as any kernel.
  template <class Library>
  static void implement(Library& m) {
    m.impl("token_sort_", TORCH_BOX(&token_sort_));
    m.impl("token_gather", TORCH_BOX(&token_gather));
    m.impl("token_scatter_", TORCH_BOX(&token_scatter_));
    m.impl("mask_gather_bert", TORCH_BOX(&mask_gather_bert));
  }

  static void token_sort_(const Tensor& indices, int64_t seq_len) {
    const char* op = "token_sort_";
    check_int32(op, indices);
    DS_KERNELS_CHECK(indices.dim() > 0, op, "indices has no dimensions; expected [..., reserved]");
    check_no_self_overlap(op, "indices", indices);
    const Device device(TensorRef(indices.get()).device_index());
    const Tensor from = without_gaps(indices);
    check_range(op, device, from, seq_len);
    if (indices.numel() == 0) return;
    const Tensor sorted = new_tensor(from, from.sizes());
    const int64_t reserved = indices.size(indices.dim() - 1);
    // No index is beyond the first 2^31 tokens.
    const int64_t sequence = seq_len < int64_t{1} << 31 ? seq_len : int64_t{1} << 31;
    const TokenRows rows{static_cast<const int32_t*>(from.data_ptr()), static_cast<int32_t*>(sorted.data_ptr()),
                         indices.numel() / reserved, reserved, sequence};
    device.run(op, rows, kAnyDtype);
    write_back(indices, sorted);
  }

  static Tensor token_gather(const Tensor& activations, const Tensor& indices, bool batch_first) {
    const char* op = "token_gather";
    const Tensor places = checked_indices(op, indices, 2, "activations", activations);
    const Batch batch(op, "activations", activations, places, batch_first);
    const Device device(TensorRef(activations.get()).device_index());
    check_range(op, device, places, batch.tokens);
    const auto shape = batch.shape(places.size(1));
    const Tensor output = new_tensor(activations, {shape.data(), 3}), all = without_gaps(activations);
    device.run(op, TokenGather{batch.move(all, output, places)}, kAnyDtype);
    return output;
  }

  static void token_scatter_(const Tensor& all_activations, const Tensor& layer_activations, const Tensor& indices,
                             bool batch_first) {
    const char* op = "token_scatter_";
    const Tensor places = checked_indices(op, indices, 2, "all_activations", all_activations);
    const Batch batch(op, "all_activations", all_activations, places, batch_first);
    check_same_device(op, "layer_activations", layer_activations, "all_activations", all_activations);
    DS_KERNELS_CHECK(TensorRef(layer_activations.get()).dtype_code() == TensorRef(all_activations.get()).dtype_code(),
                     op, "layer_activations have another dtype; expected that of all_activations");
    const auto expected = batch.shape(places.size(1));
    DS_KERNELS_CHECK(layer_activations.sizes() == Shape(expected.data(), 3), op, "layer_activations has shape ",
                     text_of(layer_activations.sizes()), "; expected ", text_of(Shape(expected.data(), 3)));
    check_no_self_overlap(op, "all_activations", all_activations);
    check_apart(op, all_activations, layer_activations);
    const Device device(TensorRef(all_activations.get()).device_index());
    check_range(op, device, places, batch.tokens);
    const Tensor all = without_gaps(all_activations), chosen = without_gaps(layer_activations);
    device.run(op, TokenScatter{batch.move(all, chosen, places)}, kAnyDtype);
    if (!all_activations.is_contiguous()) write_back(all_activations, all);
  }

  static Tensor mask_gather_bert(const Tensor& mask, const Tensor& indices) {
    const char* op = "mask_gather_bert";
    DS_KERNELS_CHECK(mask.dim() == 4 && mask.size(1) == 1 && mask.size(2) == mask.size(3), op, "mask has shape ",
                     text_of(mask.sizes()), "; expected [batch, 1, sequence, sequence]");
    const Tensor places = checked_indices(op, indices, 3, "mask", mask);
    const int64_t layers = places.size(0), batch = mask.size(0), reserved = places.size(2);
    const int64_t size = static_cast<int64_t>(mask.element_size());
    DS_KERNELS_CHECK(places.size(1) == batch, op, "indices has shape ", text_of(places.sizes()),
                     "; expected [layers, ", batch, ", reserved], as mask");
    DS_KERNELS_CHECK(size == 1 || size == 2 || size == 4 || size == 8, op, "mask has elements of ", size,
                     " bytes; expected 1, 2, 4 or 8");
    const Device device(TensorRef(mask.get()).device_index());
    check_range(op, device, places, mask.size(3));
    const int64_t shape[] = {layers, batch, 1, reserved, reserved};
    const Tensor output = new_tensor(mask, {shape, 5}), from = without_gaps(mask);
    const MaskGather work{static_cast<const char*>(from.data_ptr()), static_cast<const int32_t*>(places.data_ptr()),
                          static_cast<char*>(output.data_ptr()), layers, batch, mask.size(3), reserved, size};
    device.run(op, work, kAnyDtype);
    return output;
  }

 private:
  // A batch of sequences, whichever dimension comes first.
  struct Batch {
    int64_t sequences, tokens, channels;
    bool first;

    Batch(const char* op, const char* name, const Tensor& activations, const Tensor& indices, bool batch_first)
        : first(batch_first) {
      DS_KERNELS_CHECK(activations.dim() == 3, op, name, " has ", activations.dim(), " dimensions; expected 3");
      sequences = activations.size(first ? 0 : 1), tokens = activations.size(first ? 1 : 0);
      channels = activations.size(2);
      DS_KERNELS_CHECK(indices.size(0) == sequences, op, "indices has ", indices.size(0), " rows; expected ", sequences,
                       ", one for each sequence of ", name);
    }

    // Of so many tokens.
    std::array<int64_t, 3> shape(int64_t reserved) const {
      return {first ? sequences : reserved, first ? reserved : sequences, channels};
    }

    TokenMove move(const Tensor& all, const Tensor& chosen, const Tensor& indices) const {
      const int64_t bytes = channels * static_cast<int64_t>(all.element_size());
      return {tokens_of(all, bytes),
              tokens_of(chosen, bytes),
              static_cast<const int32_t*>(indices.data_ptr()),
              sequences,
              tokens,
              indices.size(1),
              bytes};
    }

   private:
    Tokens tokens_of(const Tensor& tensor, int64_t bytes) const {
      const int64_t outer = tensor.size(1) * bytes;
      return {static_cast<char*>(tensor.data_ptr()), first ? outer : bytes, first ? bytes : outer};
    }
  };

  static void check_int32(const char* op, const Tensor& indices) {
    DS_KERNELS_CHECK(TensorRef(indices.get()).dtype_code() == aoti_torch_dtype_int32(), op,
                     "indices have another dtype; expected int32");
  }

  static void check_same_device(const char* op, const char* name, const Tensor& tensor, const char* first_name,
                                const Tensor& first) {
    const TensorRef a(tensor.get()), b(first.get());
    DS_KERNELS_CHECK(a.device_type() == b.device_type() && a.device_index() == b.device_index(), op, name,
                     " is on another device than ", first_name, "; expected all tensors on one");
  }

  // Token indices, contiguous.
  static Tensor checked_indices(const char* op, const Tensor& indices, int64_t dimensions, const char* first_name,
                                const Tensor& first) {
    check_int32(op, indices);
    check_same_device(op, "indices", indices, first_name, first);
    DS_KERNELS_CHECK(indices.dim() == dimensions, op, "indices has ", indices.dim(), " dimensions; expected ",
                     dimensions);
    return without_gaps(indices);
  }

  static void check_range(const char* op, const Device& device, const Tensor& indices, int64_t limit) {
    bool within = true;
    const TokenCheck check{static_cast<const int32_t*>(indices.data_ptr()), indices.numel(), limit, &within};
    device.run(op, check, kAnyDtype);
    DS_KERNELS_CHECK(within, op, "indices has an entry that is no token; expected at least 0 and less than ", limit);
  }

  static void check_no_self_overlap(const char* op, const char* name, const Tensor& tensor) {
    DS_KERNELS_CHECK(!detail::may_overlap_itself(tensor.sizes(), tensor.strides()), op, name,
                     "[0] has elements that share memory (is it expanded?); expected one element at each index");
  }

  static void check_apart(const char* op, const Tensor& all, const Tensor& chosen) {
    if (!all.is_contiguous() || !chosen.is_contiguous()) return;
    DS_KERNELS_CHECK(!detail::memory_of(all).meets(detail::memory_of(chosen)), op,
                     "all_activations[0] and layer_activations[0] share memory; expected a tensor that is written to "
                     "share none");
  }

  static void write_back(const Tensor& to, const Tensor& from) {
    const NoGrad guard;
    Tensor target = to;
    torch::stable::copy_(target, from);
  }
};

}  // namespace ds_kernels
