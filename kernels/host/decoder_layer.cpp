// ds_plugin_calls::decoder_layer: the ops of a decoder layer, one after the other, on any device.
//
// It computes nothing. A step of one token calls seven small ops and four views in each layer; from Python these calls
// take longer than the ops of a small model.
#include <ds_kernels/arguments.h>

#include <stdexcept>
#include <string>

// torch 2.13 and later have it: the message of the last error. Releases before print that.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace ds_kernels {
namespace {

using torch::stable::detail::from;

// Calls an op with a stack of its arguments; its result is in the stack's first place.
void call(const char* op, StableIValue* stack) {
  if (torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION) == 0) return;
  throw std::runtime_error(torch_exception_get_what_without_backtrace
                               ? torch_exception_get_what_without_backtrace()
                               : std::string(op) + " failed; torch has printed why");
}

Tensor result_of(const char* op, StableIValue* stack) {
  call(op, stack);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

struct Norm {
  const Tensor& weight;
  const OptionalTensor& bias;  // none for an RMS norm
  double eps;

  Tensor of(const Tensor& input) const {
    if (!bias) {
      StableIValue stack[] = {from(input), from(weight), from(eps)};
      return result_of("ds_plugin::rms_norm", stack);
    }
    StableIValue stack[] = {from(input), from(weight), from(*bias), from(eps)};
    return result_of("ds_plugin::layer_norm", stack);
  }
};

struct Matrix {
  const Tensor& weight;
  const OptionalTensor& bias;
  const OptionalTensor& scales;
  const OptionalTensor& offsets;

  Tensor of(const Tensor& input, const OptionalTensor& residual = {}, int64_t activation = 0, bool gated = false) const {
    StableIValue stack[] = {from(input),   from(weight),   from(bias),       from(scales),
                            from(offsets), from(residual), from(activation), from(gated)};
    return result_of("ds_plugin::linear", stack);
  }
};

// `heads` heads from `first` on of what one product has put out: [batch, tokens, heads of all kinds * head_dim] as
// [batch, heads, tokens, head_dim], in the same memory.
Tensor heads_of(const Tensor& all, int64_t first, int64_t heads, int64_t head_dim) {
  const int64_t batch = all.size(0), tokens = all.size(1), row = all.size(2);
  const int64_t sizes[] = {batch, heads, tokens, head_dim}, strides[] = {tokens * row, head_dim, row, 1};
  AtenTensorHandle view;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(all.get(), 4, sizes, strides, first * head_dim, &view));
  return Tensor(view);
}

// What heads have made, [batch, heads, tokens, head_dim] with tokens before heads in memory, as [batch, tokens, all].
Tensor side_by_side(const Tensor& heads) {
  const int64_t batch = heads.size(0), tokens = heads.size(2), row = heads.size(1) * heads.size(3);
  const int64_t sizes[] = {batch, tokens, row}, strides[] = {tokens * row, row, 1};
  AtenTensorHandle view;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(heads.get(), 3, sizes, strides, 0, &view));
  return Tensor(view);
}

void turn(const Tensor& heads, const OptionalTensor& cos, const OptionalTensor& sin) {
  if (!cos || !sin) return;
  StableIValue stack[] = {from(heads), from(*cos), from(*sin), from(false)};
  call("ds_plugin::rotary_", stack);
}

// With scales the caches are int8.
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
              const Tensor& value_cache, const OptionalTensor& key_scales, const OptionalTensor& value_scales,
              int64_t past, double scale, const OptionalTensor& mask) {
  const OptionalTensor no_alibi;
  if (key_scales && value_scales) {
    StableIValue stack[] = {from(query),       from(key),           from(value), from(key_cache), from(value_cache),
                            from(*key_scales), from(*value_scales), from(past),  from(scale),     from(mask),
                            from(no_alibi),    from(int64_t{0}),    from(!mask)};
    return result_of("ds_plugin::cached_attention_int8", stack);
  }
  StableIValue stack[] = {from(query), from(key),  from(value),    from(key_cache),  from(value_cache), from(past),
                          from(scale), from(mask), from(no_alibi), from(int64_t{0}), from(!mask)};
  return result_of("ds_plugin::cached_attention", stack);
}

Tensor decoder_layer(const Tensor& hidden, const Tensor& key_cache, const Tensor& value_cache,
                     const OptionalTensor& key_scales, const OptionalTensor& value_scales, int64_t past,
                     const OptionalTensor& mask, const OptionalTensor& cos, const OptionalTensor& sin,
                     const Tensor& attention_norm, const OptionalTensor& attention_norm_bias, double attention_norm_eps,
                     const Tensor& mlp_norm, const OptionalTensor& mlp_norm_bias, double mlp_norm_eps,
                     const OptionalTensor& query_norm, const OptionalTensor& key_norm, double head_norm_eps,
                     const Tensor& qkv, const OptionalTensor& qkv_bias, const OptionalTensor& qkv_scales,
                     const OptionalTensor& qkv_offsets,
                     const Tensor& output, const OptionalTensor& output_bias, const OptionalTensor& output_scales,
                     const OptionalTensor& output_offsets,
                     const Tensor& mlp_in, const OptionalTensor& mlp_in_bias, const OptionalTensor& mlp_in_scales,
                     const OptionalTensor& mlp_in_offsets,
                     const Tensor& mlp_out, const OptionalTensor& mlp_out_bias, const OptionalTensor& mlp_out_scales,
                     const OptionalTensor& mlp_out_offsets,
                     int64_t heads, double scale, int64_t activation, bool gated, bool norm_first) {
  const NoGrad guard;
  const Norm before_attention{attention_norm, attention_norm_bias, attention_norm_eps};
  const Norm before_mlp{mlp_norm, mlp_norm_bias, mlp_norm_eps};
  const int64_t kv_heads = key_cache.size(1), head_dim = key_cache.size(3);

  const Matrix to_heads{qkv, qkv_bias, qkv_scales, qkv_offsets};
  const Tensor all = to_heads.of(norm_first ? before_attention.of(hidden) : hidden);
  Tensor query = heads_of(all, 0, heads, head_dim), key = heads_of(all, heads, kv_heads, head_dim);
  const Tensor value = heads_of(all, heads + kv_heads, kv_heads, head_dim);
  if (query_norm && key_norm) {
    query = Norm{*query_norm, {}, head_norm_eps}.of(query);
    key = Norm{*key_norm, {}, head_norm_eps}.of(key);
    turn(query, cos, sin);
    turn(key, cos, sin);
  } else {
    turn(heads_of(all, 0, heads + kv_heads, head_dim), cos, sin);
  }

  const Tensor attended =
      side_by_side(attend(query, key, value, key_cache, value_cache, key_scales, value_scales, past, scale, mask));

  Tensor sum = Matrix{output, output_bias, output_scales, output_offsets}.of(attended, hidden);
  if (!norm_first) sum = before_attention.of(sum);
  const Matrix to_mlp{mlp_in, mlp_in_bias, mlp_in_scales, mlp_in_offsets};
  const Tensor inner = to_mlp.of(norm_first ? before_mlp.of(sum) : sum, {}, activation, gated);
  const Tensor result = Matrix{mlp_out, mlp_out_bias, mlp_out_scales, mlp_out_offsets}.of(inner, sum);
  return norm_first ? result : before_mlp.of(result);
}

}  // namespace
}  // namespace ds_kernels

STABLE_TORCH_LIBRARY_IMPL(ds_plugin_calls, CompositeExplicitAutograd, m) {
  m.impl("decoder_layer", TORCH_BOX(&ds_kernels::decoder_layer));
}
