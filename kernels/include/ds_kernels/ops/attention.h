// ds_plugin::cached_attention and cached_attention_int8, on any device: few queries by the device's own kernel, which
// reads keys and values once at the speed of memory; many by torch's attention, which is bound by arithmetic.
#pragma once

#include <ds_kernels/arguments.h>
#include <ds_kernels/attention.h>

namespace ds_kernels {

// A call's tensors, checked, laid out for a device, and attended to by torch's means where the device has none.
class AttentionCall {
 public:
  AttentionCall(Arguments& arguments, const Tensor& query, const Tensor& key, const Tensor& value,
                const Tensor& key_cache, const Tensor& value_cache, const OptionalTensor& key_scales,
                const OptionalTensor& value_scales, int64_t past, double scale, const OptionalTensor& mask,
                const OptionalTensor& alibi, int64_t window, bool causal)
      : arguments_(arguments),
        key_cache_(key_cache),
        value_cache_(value_cache),
        key_scales_(key_scales),
        value_scales_(value_scales),
        scale_(scale) {
    check_shapes(query, key, past);
    const int64_t new_shape[] = {work_.batch, work_.kv_heads, key.size(2), work_.head_dim};
    const int64_t cache_shape[] = {work_.batch, work_.kv_heads, room(), work_.head_dim};
    arguments_.check("key", key, {new_shape, 4});
    arguments_.check("value", value, {new_shape, 4});
    check_cache("key_cache", key_cache, {cache_shape, 4});
    check_cache("value_cache", value_cache, {cache_shape, 4});
    DS_KERNELS_CHECK(window >= 0, op(), "window is ", window, "; expected a number of positions, or 0");
    work_.window = window;
    work_.causal = causal;
    work_.scale = static_cast<float>(scale);
    take_cache("key_cache", key_cache_, work_.key_cache, work_.key_cache_strides);
    take_cache("value_cache", value_cache_, work_.value_cache, work_.value_cache_strides);
    take_scales("key_scales", key_scales_, work_.key_scales, work_.key_scales_strides);
    take_scales("value_scales", value_scales_, work_.value_scales, work_.value_scales_strides);
    take_alibi(alibi);
    take_mask(mask);
    query_ = arguments_.apart(with_whole_heads(query));
    key_ = arguments_.apart(with_whole_heads(key));
    value_ = arguments_.apart(with_whole_heads(value));
    work_.query = query_.data_ptr();
    work_.key = key_.data_ptr();
    work_.value = value_.data_ptr();
    work_.query_strides = strides_of(query_);
    work_.key_strides = strides_of(key_);
    work_.value_strides = strides_of(value_);
  }

  const char* op() const { return arguments_.op(); }
  Dtype dtype() const { return arguments_.dtype(); }
  const Attention& work() const { return work_; }
  bool is_quantized() const { return key_scales_.has_value(); }
  bool is_empty() const { return work_.batch * work_.heads * work_.tokens * work_.head_dim == 0; }

  // The result, for the work to be written to: [batch, heads, tokens, head_dim], in memory [batch, tokens, heads,
  // head_dim].
  Tensor new_output() {
    const int64_t shape[] = {work_.batch, work_.tokens, work_.heads, work_.head_dim};
    const Tensor memory = new_tensor(query_, {shape, 4});
    work_.output = memory.data_ptr();
    return torch::stable::transpose(memory, 1, 2);
  }

  // Puts what was appended where the caches' heads do not lie together, and copies took their place.
  void write_back(const Tensor& key_cache, const Tensor& value_cache) const {
    if (key_cache.stride(3) != 1) torch::stable::copy_(const_cast<Tensor&>(key_cache), key_cache_);
    if (value_cache.stride(3) != 1) torch::stable::copy_(const_cast<Tensor&>(value_cache), value_cache_);
  }

  // ---- by torch's means ------------------------------------------------------------------------------------------

  // Whether torch's attention needs no bias to give the same. It counts a causal query's position from the first key,
  // we from the last, and multiplies the -inf of a key that is not seen by the scale.
  bool needs_no_bias() const {
    return work_.mask_kind == Mask::None && !work_.alibi && work_.window == 0 &&
           (!work_.causal || work_.tokens == 1 || (work_.tokens == work_.total && scale_ > 0));
  }

  // Appends keys and values to caches of the query's dtype.
  void append() {
    append_to(key_cache_, key_);
    append_to(value_cache_, value_);
  }

  // A tensor of the query's dtype and device.
  Tensor new_like_query(Shape shape) const { return new_tensor(query_, shape); }
  Tensor new_floats(int64_t count) const { return new_float_tensor(query_, vector_of(count)); }

  // torch's attention to what the caches hold by now: with a bias, or without where none is needed. Heads of keys can be
  // repeated for their queries first: some of torch's kernels want as many.
  Tensor torch_attention(const OptionalTensor& bias, bool repeat_heads = false) {
    const Tensor query = aligned(query_);
    Tensor keys = aligned(held(key_cache_, key_scales_)), values = aligned(held(value_cache_, value_scales_));
    bool grouped = work_.heads != work_.kv_heads;
    if (grouped && repeat_heads) keys = repeated(keys), values = repeated(values), grouped = false;
    const bool causal = !bias && work_.causal && work_.tokens > 1;
    using torch::stable::detail::from;
    StableIValue stack[] = {from(query),  from(keys),   from(values),
                            from(bias),   from(0.0),    from(causal),
                            from(std::optional<double>(scale_)), from(grouped)};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::scaled_dot_product_attention", "", stack, TORCH_ABI_VERSION));
    const Tensor result = torch::stable::detail::to<Tensor>(stack[0]);
    Tensor output = new_output();
    if (result.strides() == output.strides()) return result;
    torch::stable::copy_(output, result);
    return output;
  }

  // The op's reference, which also appends.
  Tensor reference() const {
    using torch::stable::detail::from;
    std::vector<StableIValue> stack{from(query_), from(key_), from(value_), from(key_cache_), from(value_cache_)};
    if (is_quantized()) stack.insert(stack.end(), {from(*key_scales_), from(*value_scales_)});
    stack.insert(stack.end(), {from(work_.past), from(scale_), from(mask_), from(alibi_), from(work_.window),
                               from(work_.causal)});
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(
        is_quantized() ? "ds_plugin_reference::cached_attention_int8" : "ds_plugin_reference::cached_attention", "",
        stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }

 private:
  // What a cache holds by now: floats of the query's dtype in the place of an int8 one.
  Tensor held(const Tensor& cache, const OptionalTensor& scales) const {
    Tensor all = torch::stable::narrow(const_cast<Tensor&>(cache), 2, 0, work_.total);
    if (!scales) return all;
    using torch::stable::detail::from;
    Tensor steps = torch::stable::narrow(const_cast<Tensor&>(*scales), 2, 0, work_.total);
    StableIValue stack[] = {from(all), from(steps)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mul", "Tensor", stack, TORCH_ABI_VERSION));
    const Tensor exact = torch::stable::detail::to<Tensor>(stack[0]);
    if (arguments_.dtype() == Dtype::Float32) return exact;
    Tensor rounded = new_tensor(query_, exact.sizes());
    torch::stable::copy_(rounded, exact);
    return rounded;
  }

  // A tensor that begins at a multiple of 16 bytes, as its heads do if their size allows it: some of torch's kernels read
  // so wherever a tensor begins.
  Tensor aligned(const Tensor& tensor) const {
    const int64_t pack = arguments_.dtype() == Dtype::Float32 ? 4 : 8;
    bool is_so = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
    for (int64_t i = 0; i < 3; ++i) is_so = is_so && (tensor.size(i) == 1 || tensor.stride(i) % pack == 0);
    if (is_so || (work_.head_dim % pack != 0 && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0)) return tensor;
    Tensor copy = new_tensor(query_, tensor.sizes());
    torch::stable::copy_(copy, tensor);
    return copy;
  }

  // Each head of keys as often as it has heads of queries.
  Tensor repeated(const Tensor& heads) const {
    using torch::stable::detail::from;
    StableIValue stack[] = {from(heads), from(work_.group()), from(std::optional<int64_t>(1)),
                            from(std::optional<int64_t>())};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::repeat_interleave", "self_int", stack, TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }

  static HeadStrides strides_of(const Tensor& tensor) {
    return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
  }

  // A tensor whose heads lie together, itself if it is so.
  static Tensor with_whole_heads(const Tensor& tensor) {
    return tensor.stride(3) == 1 ? tensor : torch::stable::contiguous(tensor);
  }

  static int64_t code_of(const Tensor& tensor) { return TensorRef(tensor.get()).dtype_code(); }

  int64_t room() const { return key_cache_.dim() == 4 ? key_cache_.size(2) : 0; }

  void check_shapes(const Tensor& query, const Tensor& key, int64_t past) {
    DS_KERNELS_CHECK(query.dim() == 4, op(), "query is ", text_of(query.sizes()),
                     "; expected [batch, heads, tokens, head_dim]");
    work_.batch = query.size(0);
    work_.heads = query.size(1);
    work_.tokens = query.size(2);
    work_.head_dim = query.size(3);
    DS_KERNELS_CHECK(key.dim() == 4 && key.size(1) > 0 && work_.heads % key.size(1) == 0, op(), "key is ",
                     text_of(key.sizes()), "; expected [batch, kv_heads, tokens, head_dim], a divisor of ", work_.heads,
                     " heads");
    work_.kv_heads = key.size(1);
    work_.past = past;
    work_.total = past + key.size(2);
    DS_KERNELS_CHECK(past >= 0 && work_.total <= room() && work_.tokens <= work_.total &&
                         (key.size(2) == 0 || key.size(2) == work_.tokens),
                     op(), "past is ", past, ", with ", work_.tokens, " queries and ", key.size(2),
                     " keys; expected as many keys or none, and at most ", room(),
                     " positions, the room of key_cache");
  }

  void take_alibi(const OptionalTensor& alibi) {
    if (!alibi) return;
    arguments_.check_device("alibi", *alibi);
    DS_KERNELS_CHECK(alibi->dim() == 1 && alibi->size(0) == work_.heads &&
                         code_of(*alibi) == aoti_torch_dtype_float32(),
                     op(), "alibi is ", text_of(alibi->sizes()), "; expected float32 [", work_.heads, "]");
    alibi_ = arguments_.apart(without_gaps(*alibi));
    work_.alibi = static_cast<const float*>(alibi_->data_ptr());
  }

  void take_mask(const OptionalTensor& given) {
    if (!given) return;
    arguments_.check_device("mask", *given);
    const bool boolean = code_of(*given) == aoti_torch_dtype_bool();
    const bool flat = given->dim() == 2;
    const int64_t sizes[] = {work_.batch, work_.heads, work_.tokens};
    bool fits = flat || given->dim() == 4;
    for (int64_t i = 0; fits && i < (flat ? 1 : 3); ++i) fits = given->size(i) == 1 || given->size(i) == sizes[i];
    DS_KERNELS_CHECK(fits && given->size(given->dim() - 1) >= work_.total, op(), "mask is ", text_of(given->sizes()),
                     "; expected [", work_.batch, ", ", work_.total, "] or what broadcasts to [", work_.batch, ", ",
                     work_.heads, ", ", work_.tokens, ", ", work_.total, "], or more positions");
    const Dtype dtype = boolean ? arguments_.dtype() : dtype_of(op(), "mask", TensorRef(given->get()));
    DS_KERNELS_CHECK(boolean || dtype == arguments_.dtype() || dtype == Dtype::Float32, op(),
                     "mask has another dtype than query; expected bool, float32 or ", name_of(arguments_.dtype()));
    const int64_t last = given->stride(given->dim() - 1);
    mask_ = arguments_.apart(last == 1 || last == 0 ? *given : torch::stable::contiguous(*given));
    work_.mask_kind = boolean ? Mask::Bool : dtype == Dtype::Float32 ? Mask::Float : Mask::Element;
    work_.mask = mask_->data_ptr();
    const auto stride = [&](int64_t i) { return mask_->size(i) == 1 ? 0 : mask_->stride(i); };
    work_.mask_strides[0] = stride(0);
    work_.mask_strides[1] = flat ? 0 : stride(1);
    work_.mask_strides[2] = flat ? 0 : stride(2);
    work_.mask_strides[3] = mask_->stride(mask_->dim() - 1);
  }

  void check_cache(const char* name, const Tensor& cache, Shape shape) const {
    if (!is_quantized()) return arguments_.check(name, cache, shape);
    check_kind(name, cache, aoti_torch_dtype_int8(), "int8", shape);
  }

  void check_kind(const char* name, const Tensor& tensor, int64_t code, const char* dtype, Shape shape) const {
    arguments_.check_device(name, tensor);
    DS_KERNELS_CHECK(code_of(tensor) == code && tensor.sizes() == shape, op(), name, " is ", text_of(tensor.sizes()),
                     "; expected ", dtype, " ", text_of(shape));
  }

  void take_scales(const char* name, const OptionalTensor& scales, float*& data, HeadStrides& strides) {
    if (!scales) return;
    const int64_t shape[] = {work_.batch, work_.kv_heads, room(), 1};
    check_kind(name, *scales, aoti_torch_dtype_float32(), "float32", {shape, 4});
    arguments_.check_elements(name, *scales);
    arguments_.write_in_place(*scales);
    data = static_cast<float*>(scales->data_ptr());
    strides = strides_of(*scales);
  }

  void take_cache(const char* name, Tensor& cache, void*& data, HeadStrides& strides) {
    arguments_.check_elements(name, cache);
    cache = with_whole_heads(cache);
    arguments_.write_in_place(cache);
    data = cache.data_ptr();
    strides = strides_of(cache);
  }

  void append_to(Tensor& cache, const Tensor& tokens) const {
    if (work_.total == work_.past) return;
    Tensor room = torch::stable::narrow(cache, 2, work_.past, work_.total - work_.past);
    torch::stable::copy_(room, tokens);
  }

  Arguments& arguments_;
  Tensor query_, key_, value_, key_cache_, value_cache_;
  OptionalTensor key_scales_, value_scales_, mask_, alibi_;
  double scale_;
  Attention work_{};
};

// Asks its Device, see binding.h, for Attention. It also has
//   bool takes(const AttentionCall& call) const;  // whether its own kernel is the way to do it
//   Tensor attend_by_torch(AttentionCall& call) const;  // by means of the call; reference() is right for any
template <class Device>
struct AttentionOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("cached_attention", TORCH_BOX(&cached_attention));
    m.impl("cached_attention_int8", TORCH_BOX(&cached_attention_int8));
  }

  static Tensor cached_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                                 const Tensor& value_cache, int64_t past, double scale, const OptionalTensor& mask,
                                 const OptionalTensor& alibi, int64_t window, bool causal) {
    return attend("cached_attention", query, key, value, key_cache, value_cache, {}, {}, past, scale, mask, alibi,
                  window, causal);
  }

  static Tensor cached_attention_int8(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const Tensor& key_cache, const Tensor& value_cache, const Tensor& key_scales,
                                      const Tensor& value_scales, int64_t past, double scale,
                                      const OptionalTensor& mask, const OptionalTensor& alibi, int64_t window,
                                      bool causal) {
    return attend("cached_attention_int8", query, key, value, key_cache, value_cache, key_scales, value_scales, past,
                  scale, mask, alibi, window, causal);
  }

 private:
  static Tensor attend(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                       const Tensor& key_cache, const Tensor& value_cache, const OptionalTensor& key_scales,
                       const OptionalTensor& value_scales, int64_t past, double scale, const OptionalTensor& mask,
                       const OptionalTensor& alibi, int64_t window, bool causal) {
    const NoGrad guard;
    Arguments arguments(op, "query", query);
    const Device device(arguments.device_index());
    AttentionCall call(arguments, query, key, value, key_cache, value_cache, key_scales, value_scales, past, scale,
                       mask, alibi, window, causal);
    Tensor output = run(device, call);
    call.write_back(key_cache, value_cache);
    return output;
  }

  static Tensor run(const Device& device, AttentionCall& call) {
    if (call.is_empty()) return call.reference();
    if (!device.takes(call)) return device.attend_by_torch(call);
    Tensor output = call.new_output();
    device.run(call.op(), call.work(), call.dtype());
    return output;
  }
};

}  // namespace ds_kernels
