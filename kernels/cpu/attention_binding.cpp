// ds_plugin::cached_attention for tensors in host memory: few queries by our own loops, which read keys and values once
// at the speed of memory; many by torch's attention, which is bound by arithmetic.
#include "attention_loops.h"

#include <atomic>

#include <ds_kernels/arguments.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(AttentionLoops, attention_loops)

namespace {

constexpr const char* kOp = "cached_attention";

// From this many queries of a head on torch's attention is faster.
constexpr int64_t kManyTokens = 8;
// Positions of one part, the same for any number of threads, so that results are too.
constexpr int64_t kPart = 512;
// What the loops hold of a query.
constexpr int64_t kMostHeadDim = 1024;

HeadStrides head_strides(const Tensor& tensor) { return {tensor.stride(0), tensor.stride(1), tensor.stride(2)}; }

// A tensor whose heads lie together, itself if it is so.
Tensor with_whole_heads(const Tensor& tensor) {
  return tensor.stride(3) == 1 ? tensor : torch::stable::contiguous(tensor);
}

int64_t code_of(const Tensor& tensor) { return TensorRef(tensor.get()).dtype_code(); }

// A call's tensors, checked.
class CachedAttention {
 public:
  CachedAttention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                  const Tensor& value_cache, int64_t past, double scale, const OptionalTensor& mask,
                  const OptionalTensor& alibi, int64_t window, bool causal)
      : arguments_(kOp, "query", query), loops_(loops_for(kOp, all_attention_loops())), key_cache_(key_cache),
        value_cache_(value_cache), scale_(scale) {
    check_shapes(query, key, past);
    const int64_t new_tokens = key.size(2);
    const int64_t new_shape[] = {task_.batch, task_.kv_heads, new_tokens, task_.head_dim};
    const int64_t cache_shape[] = {task_.batch, task_.kv_heads, room(), task_.head_dim};
    arguments_.check("key", key, {new_shape, 4});
    arguments_.check("value", value, {new_shape, 4});
    arguments_.check("key_cache", key_cache, {cache_shape, 4});
    arguments_.check("value_cache", value_cache, {cache_shape, 4});
    DS_KERNELS_CHECK(window >= 0, kOp, "window is ", window, "; expected a number of positions, or 0");
    task_.window = window;
    task_.causal = causal;
    task_.scale = static_cast<float>(scale);
    take_alibi(alibi);
    take_mask(mask);
    query_ = with_whole_heads(query);
    key_ = with_whole_heads(key);
    value_ = with_whole_heads(value);
    take_cache("key_cache", key_cache_, task_.key_cache, task_.key_cache_strides);
    take_cache("value_cache", value_cache_, task_.value_cache, task_.value_cache_strides);
    task_.query = query_.data_ptr();
    task_.key = key_.data_ptr();
    task_.value = value_.data_ptr();
    task_.query_strides = head_strides(query_);
    task_.key_strides = head_strides(key_);
    task_.value_strides = head_strides(value_);
  }

  Tensor run(const Tensor& key_cache, const Tensor& value_cache) {
    const bool empty = task_.batch * task_.heads * task_.tokens * task_.head_dim == 0;
    Tensor output = task_.tokens < kManyTokens && task_.head_dim <= kMostHeadDim && !empty ? few() : many();
    const NoGrad guard;
    if (key_cache.stride(3) != 1) torch::stable::copy_(const_cast<Tensor&>(key_cache), key_cache_);
    if (value_cache.stride(3) != 1) torch::stable::copy_(const_cast<Tensor&>(value_cache), value_cache_);
    return output;
  }

 private:
  int64_t room() const { return key_cache_.dim() == 4 ? key_cache_.size(2) : 0; }

  void check_shapes(const Tensor& query, const Tensor& key, int64_t past) {
    DS_KERNELS_CHECK(query.dim() == 4, kOp, "query is ", text_of(query.sizes()),
                     "; expected [batch, heads, tokens, head_dim]");
    task_.batch = query.size(0);
    task_.heads = query.size(1);
    task_.tokens = query.size(2);
    task_.head_dim = query.size(3);
    DS_KERNELS_CHECK(key.dim() == 4 && key.size(1) > 0 && task_.heads % key.size(1) == 0, kOp, "key is ",
                     text_of(key.sizes()), "; expected [batch, kv_heads, tokens, head_dim], a divisor of ", task_.heads,
                     " heads");
    task_.kv_heads = key.size(1);
    task_.past = past;
    task_.total = past + key.size(2);
    DS_KERNELS_CHECK(past >= 0 && task_.total <= room() && task_.tokens <= task_.total &&
                         (key.size(2) == 0 || key.size(2) == task_.tokens),
                     kOp, "past is ", past, ", with ", task_.tokens, " queries and ", key.size(2),
                     " keys; expected as many keys or none, and at most ", room(),
                     " positions, the room of key_cache");
  }

  void take_alibi(const OptionalTensor& alibi) {
    if (!alibi) return;
    arguments_.check_device("alibi", *alibi);
    DS_KERNELS_CHECK(alibi->dim() == 1 && alibi->size(0) == task_.heads && code_of(*alibi) == aoti_torch_dtype_float32(),
                     kOp, "alibi is ", text_of(alibi->sizes()), "; expected float32 [", task_.heads, "]");
    alibi_ = torch::stable::contiguous(*alibi);
    task_.alibi = static_cast<const float*>(alibi_->data_ptr());
  }

  void take_mask(const OptionalTensor& given) {
    if (!given) return;
    arguments_.check_device("mask", *given);
    const bool boolean = code_of(*given) == aoti_torch_dtype_bool();
    const bool flat = given->dim() == 2;
    const int64_t sizes[] = {task_.batch, task_.heads, task_.tokens};
    bool fits = flat || given->dim() == 4;
    for (int64_t i = 0; fits && i < (flat ? 1 : 3); ++i) fits = given->size(i) == 1 || given->size(i) == sizes[i];
    DS_KERNELS_CHECK(fits && given->size(given->dim() - 1) >= task_.total, kOp, "mask is ", text_of(given->sizes()),
                     "; expected [", task_.batch, ", ", task_.total, "] or what broadcasts to [", task_.batch, ", ",
                     task_.heads, ", ", task_.tokens, ", ", task_.total, "], or more positions");
    const Dtype dtype = boolean ? arguments_.dtype() : dtype_of(kOp, "mask", TensorRef(given->get()));
    DS_KERNELS_CHECK(boolean || dtype == arguments_.dtype() || dtype == Dtype::Float32, kOp,
                     "mask has another dtype than query; expected bool, float32 or ", name_of(arguments_.dtype()));
    const int64_t last = given->stride(given->dim() - 1);
    mask_ = last == 1 || last == 0 ? *given : torch::stable::contiguous(*given);
    task_.mask_kind = boolean ? Mask::Bool : dtype == Dtype::Float32 ? Mask::Float : Mask::Element;
    task_.mask = mask_->data_ptr();
    const auto stride = [&](int64_t i) { return mask_->size(i) == 1 ? 0 : mask_->stride(i); };
    const int64_t dims = mask_->dim();
    task_.mask_strides[0] = stride(0);
    task_.mask_strides[1] = flat ? 0 : stride(1);
    task_.mask_strides[2] = flat ? 0 : stride(2);
    task_.mask_strides[3] = mask_->stride(dims - 1);
  }

  void take_cache(const char* name, Tensor& cache, void*& data, HeadStrides& strides) {
    DS_KERNELS_CHECK(!detail::may_overlap_itself(cache.sizes(), cache.strides()), kOp, name,
                     " has elements that share memory (is it expanded?); expected one element at each index");
    cache = with_whole_heads(cache);
    data = cache.data_ptr();
    strides = head_strides(cache);
  }

  // [batch, heads, tokens, head_dim], in memory [batch, tokens, heads, head_dim].
  Tensor new_output() {
    const int64_t shape[] = {task_.batch, task_.tokens, task_.heads, task_.head_dim};
    const Tensor memory = new_tensor(query_, {shape, 4});
    task_.output = memory.data_ptr();
    return torch::stable::transpose(memory, 1, 2);
  }

  Tensor few() {
    const Dtype dtype = arguments_.dtype();
    const NoGrad guard;
    Tensor output = new_output();
    task_.part = kPart;
    task_.parts = std::max<int64_t>(1, (task_.total + kPart - 1) / kPart);
    std::vector<float> partial(task_.items() * task_.partial_size());
    task_.partial = partial.data();
    const int64_t queries = task_.group() * task_.tokens;
    const int64_t work = queries * std::min(task_.total, kPart) * task_.head_dim;
    parallel_for(0, task_.items(), row_grain(work),
                 [&](int64_t begin, int64_t end) { loops_.attend(dtype, task_, begin, end); });
    parallel_for(0, task_.batch * task_.kv_heads, row_grain(queries * task_.parts * task_.head_dim),
                 [&](int64_t begin, int64_t end) { loops_.finish(dtype, task_, begin, end); });
    return output;
  }

  Tensor many() {
    const Dtype dtype = arguments_.dtype();
    const NoGrad guard;
    parallel_for(0, task_.batch * task_.kv_heads, row_grain((task_.total - task_.past) * task_.head_dim),
                 [&](int64_t begin, int64_t end) { loops_.append(dtype, task_, begin, end); });
    // torch counts a causal query's position from the first key, we from the last.
    // Without a mask it makes zeros of a query whose scores are NaN; with one it does not.
    const bool plain = !mask_ && !alibi_ && task_.window == 0 && all_finite(dtype);
    const bool causal = plain && task_.causal && task_.tokens == task_.total;
    OptionalTensor bias;
    if (!causal && !(plain && !task_.causal)) bias = biases(dtype);
    const Tensor keys = torch::stable::narrow(key_cache_, 2, 0, task_.total);
    const Tensor values = torch::stable::narrow(value_cache_, 2, 0, task_.total);
    using torch::stable::detail::from;
    StableIValue stack[] = {from(query_), from(keys),   from(values),
                            from(bias),   from(0.0),    from(causal),
                            from(std::optional<double>(scale_)), from(task_.heads != task_.kv_heads)};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::scaled_dot_product_attention", "", stack, TORCH_ABI_VERSION));
    const Tensor result = torch::stable::detail::to<Tensor>(stack[0]);
    Tensor output = new_output();
    if (result.strides() == output.strides()) return result;
    torch::stable::copy_(output, result);
    return output;
  }

  bool all_finite(Dtype dtype) {
    std::atomic<bool> finite{true};
    parallel_for(0, task_.batch * task_.kv_heads, row_grain(task_.total * task_.head_dim),
                 [&](int64_t begin, int64_t end) {
                   if (!loops_.finite(dtype, task_, begin, end)) finite = false;
                 });
    return finite;
  }

  Tensor biases(Dtype dtype) {
    const int64_t batches = task_.mask_kind != Mask::None && task_.mask_strides[0] ? task_.batch : 1;
    const int64_t heads = alibi_ || (task_.mask_kind != Mask::None && task_.mask_strides[1]) ? task_.heads : 1;
    const int64_t shape[] = {batches, heads, task_.tokens, task_.total};
    Tensor bias = torch::stable::empty({shape, 4}, torch::headeronly::ScalarType::Float);
    auto* to = static_cast<float*>(bias.data_ptr());
    parallel_for(0, batches * heads * task_.tokens, row_grain(task_.total),
                 [&](int64_t begin, int64_t end) { loops_.bias(dtype, task_, heads, to, begin, end); });
    return bias;
  }

  Arguments arguments_;
  const AttentionLoops& loops_;
  Tensor query_, key_, value_, key_cache_, value_cache_;
  OptionalTensor mask_, alibi_;
  double scale_;
  AttentionTask task_{};
};

Tensor cached_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                        const Tensor& value_cache, int64_t past, double scale, const OptionalTensor& mask,
                        const OptionalTensor& alibi, int64_t window, bool causal) {
  return CachedAttention(query, key, value, key_cache, value_cache, past, scale, mask, alibi, window, causal)
      .run(key_cache, value_cache);
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) { m.impl("cached_attention", TORCH_BOX(&cached_attention)); }

}  // namespace ds_kernels::cpu
