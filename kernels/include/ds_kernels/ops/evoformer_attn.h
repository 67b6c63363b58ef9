// ds_plugin::evoformer_attention and its derivative, on any device.
#pragma once

#include <cmath>
#include <tuple>

#include <ds_kernels/arguments.h>
#include <ds_kernels/evoformer_attn.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for EvoformerAttention and EvoformerBackward. It also has
//   static bool takes(const EvoformerShape& shape);  // whether its kernels are for such heads
template <class Device>
struct EvoformerOps {
  using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

  template <class Library>
  static void implement(Library& m) {
    m.impl("evoformer_attention", TORCH_BOX(&evoformer_attention));
    m.impl("evoformer_attention_backward", TORCH_BOX(&evoformer_attention_backward));
  }

  static std::tuple<Tensor, Tensor> evoformer_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                        const OptionalTensor& mask_bias,
                                                        const OptionalTensor& pair_bias) {
    const NoGrad guard;
    Arguments arguments("evoformer_attention", "query", query);
    const EvoformerShape shape = shape_of(arguments.op(), query);
    EvoformerAttention work{};
    work.in = inputs(arguments, shape, query, key, value, mask_bias, pair_bias);
    const Device device(arguments.device_index());
    if (!Device::takes(shape)) {
      using torch::stable::detail::from;
      using torch::stable::detail::to;
      StableIValue stack[] = {from(query), from(key), from(value), from(mask_bias), from(pair_bias)};
      reference("ds_plugin_reference::evoformer_attention", stack);
      return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
    }
    const Tensor output = new_tensor(query, query.sizes()), sums = new_sums(query, shape);
    work.output = output.data_ptr();
    work.logsumexp = static_cast<float*>(sums.data_ptr());
    if (output.numel() > 0) device.run(arguments.op(), work, arguments.dtype());
    return {output, sums};
  }

  static Gradients evoformer_attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                const Tensor& value, const Tensor& output, const Tensor& logsumexp,
                                                const OptionalTensor& mask_bias, const OptionalTensor& pair_bias,
                                                bool mask_grad, bool pair_grad) {
    const NoGrad guard;
    Arguments arguments("evoformer_attention_backward", "query", query);
    const char* op = arguments.op();
    const EvoformerShape shape = shape_of(op, query);
    EvoformerBackward work{};
    work.in = inputs(arguments, shape, query, key, value, mask_bias, pair_bias);
    work.grad = arguments.read("grad", grad, query.sizes());
    work.output = arguments.read("output", output, query.sizes());
    const Tensor sums = checked_sums(arguments, shape, logsumexp);
    work.logsumexp = static_cast<const float*>(sums.data_ptr());
    check_wanted(op, "mask_bias", mask_bias, mask_grad);
    check_wanted(op, "pair_bias", pair_bias, pair_grad);
    const Device device(arguments.device_index());
    if (!Device::takes(shape)) {
      using torch::stable::detail::from;
      using torch::stable::detail::to;
      StableIValue stack[] = {from(grad),      from(query),     from(key), from(value),     from(output),
                              from(logsumexp), from(mask_bias), from(pair_bias),       from(mask_grad), from(pair_grad)};
      reference("ds_plugin_reference::evoformer_attention_backward", stack);
      return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2]), to<Tensor>(stack[3]),
              to<Tensor>(stack[4])};
    }
    const Tensor of_query = new_tensor(query, query.sizes()), of_key = new_tensor(query, query.sizes()),
                 of_value = new_tensor(query, query.sizes());
    const int64_t none = 0, mask_shape[] = {shape.batch, shape.rows, shape.tokens},
                  pair_shape[] = {shape.batch, shape.heads, shape.tokens, shape.tokens};
    const Tensor of_mask = new_float_tensor(query, mask_grad ? Shape(mask_shape, 3) : Shape(&none, 1));
    const Tensor of_pair = new_float_tensor(query, pair_grad ? Shape(pair_shape, 4) : Shape(&none, 1));
    work.query_grad = of_query.data_ptr();
    work.key_grad = of_key.data_ptr();
    work.value_grad = of_value.data_ptr();
    work.mask_grad = mask_grad ? static_cast<float*>(of_mask.data_ptr()) : nullptr;
    work.pair_grad = pair_grad ? static_cast<float*>(of_pair.data_ptr()) : nullptr;
    if (query.numel() > 0) {
      device.run(op, work, arguments.dtype());
    } else {  // of no rows, heads or tokens: sums of nothing
      const_cast<Tensor&>(of_mask) = torch::stable::fill_(const_cast<Tensor&>(of_mask), 0.0);
      const_cast<Tensor&>(of_pair) = torch::stable::fill_(const_cast<Tensor&>(of_pair), 0.0);
    }
    return {of_query, of_key, of_value, of_mask, of_pair};
  }

 private:
  template <size_t count>
  static void reference(const char* op, StableIValue (&stack)[count]) {
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION));
  }

  static EvoformerShape shape_of(const char* op, const Tensor& query) {
    DS_KERNELS_CHECK(query.dim() == 5 && query.size(4) > 0, op, "query has shape ", text_of(query.sizes()),
                     "; expected [batch, rows, tokens, heads, head_dim], no empty heads");
    return {query.size(0), query.size(1), query.size(2), query.size(3), query.size(4)};
  }

  static EvoformerInputs inputs(Arguments& arguments, const EvoformerShape& s, const Tensor& query, const Tensor& key,
                                const Tensor& value, const OptionalTensor& mask_bias,
                                const OptionalTensor& pair_bias) {
    const int64_t mask[] = {s.batch, s.rows, s.tokens}, pair[] = {s.batch, s.heads, s.tokens, s.tokens};
    EvoformerInputs in{};
    in.shape = s;
    in.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.head_dim)));
    in.query = arguments.read("query", query, query.sizes());
    in.key = arguments.read("key", key, query.sizes());
    in.value = arguments.read("value", value, query.sizes());
    in.mask_bias = arguments.read("mask_bias", mask_bias, {mask, 3});
    in.pair_bias = arguments.read("pair_bias", pair_bias, {pair, 4});
    return in;
  }

  static Tensor new_sums(const Tensor& query, const EvoformerShape& s) {
    const int64_t shape[] = {s.batch, s.rows, s.heads, s.tokens};
    return new_float_tensor(query, {shape, 4});
  }

  static Tensor checked_sums(const Arguments& arguments, const EvoformerShape& s, const Tensor& sums) {
    const int64_t shape[] = {s.batch, s.rows, s.heads, s.tokens};
    arguments.check_device("logsumexp", sums);
    DS_KERNELS_CHECK(TensorRef(sums.get()).dtype_code() == aoti_torch_dtype_float32(), arguments.op(),
                     "logsumexp has another dtype; expected float32");
    DS_KERNELS_CHECK(sums.sizes() == Shape(shape, 4), arguments.op(), "logsumexp has shape ", text_of(sums.sizes()),
                     "; expected ", text_of({shape, 4}));
    return without_gaps(sums);
  }

  static void check_wanted(const char* op, const char* name, const OptionalTensor& bias, bool wanted) {
    DS_KERNELS_CHECK(!wanted || bias, op, name, " is not there; expected it where its gradient is wanted");
  }
};

}  // namespace ds_kernels
