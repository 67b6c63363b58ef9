// ds_plugin_calls::decoder_layers: the ops of decoder layers, one after the other, on any device.
//
// It computes nothing. A step of one token calls seven small ops and four views in each layer; from Python these calls
// take longer than the ops of a small model, and through torch's dispatcher a tenth of a step in int4.
#include <ds_kernels/op_functions.h>
#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "as_found.h"

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

[[noreturn]] void reject(const std::string& why) { throw std::runtime_error("ds_plugin_calls::decoder_layers: " + why); }

Tensor result_of(const char* op, StableIValue* stack) {
  call(op, stack);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The ops: functions of the kernels for the device, where they are known, or whatever torch's dispatcher finds.
struct Ops {
  OpFunctions functions;

  Tensor layer_norm(const Tensor& input, const Tensor& weight, const Tensor& bias, double eps) const {
    if (functions.layer_norm) return functions.layer_norm(input, weight, bias, eps);
    StableIValue stack[] = {from(input), from(weight), from(bias), from(eps)};
    return result_of("ds_plugin::layer_norm", stack);
  }

  Tensor rms_norm(const Tensor& input, const Tensor& weight, double eps, double weight_offset) const {
    if (functions.rms_norm) return functions.rms_norm(input, weight, eps, weight_offset);
    StableIValue stack[] = {from(input), from(weight), from(eps), from(weight_offset)};
    return result_of("ds_plugin::rms_norm", stack);
  }

  Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& scales,
                const OptionalTensor& offsets, const OptionalTensor& residual, int64_t activation, bool gated) const {
    if (functions.linear) return functions.linear(input, weight, bias, scales, offsets, residual, activation, gated);
    StableIValue stack[] = {from(input),   from(weight),   from(bias),       from(scales),
                            from(offsets), from(residual), from(activation), from(gated)};
    return result_of("ds_plugin::linear", stack);
  }

  Tensor activation_and_mul(const Tensor& gate, const Tensor& up, int64_t activation) const {
    if (functions.activation_and_mul) return functions.activation_and_mul(gate, up, activation);
    StableIValue stack[] = {from(gate), from(up), from(activation)};
    return result_of("ds_plugin::activation_and_mul", stack);
  }

  // residual + multiplier * other, which is not kept.
  Tensor sum_of(const Tensor& residual, const Tensor& other, double multiplier) const {
    const OptionalTensor none;
    if (functions.residual_add_bias_) {
      functions.residual_add_bias_(other, residual, none, none, none, multiplier, false);
    } else if (multiplier == 1.0) {
      return torch::stable::subtract(residual, other, -1.0);  // there is no stable sum
    } else {
      StableIValue stack[] = {from(other), from(residual),   from(none), from(none),
                              from(none),  from(multiplier), from(false)};
      call("ds_plugin::residual_add_bias_", stack);
    }
    return other;
  }

  void rotary_(const Tensor& heads, const Tensor& cos, const Tensor& sin, bool pairs) const {
    if (functions.rotary_) return functions.rotary_(heads, cos, sin, pairs);
    StableIValue stack[] = {from(heads), from(cos), from(sin), from(pairs)};
    call("ds_plugin::rotary_", stack);
  }

  Tensor cached_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                          const Tensor& value_cache, int64_t past, double scale, const OptionalTensor& mask) const {
    const OptionalTensor no_alibi;
    const int64_t no_window = 0;
    const bool causal = !mask;
    if (functions.cached_attention) {
      return functions.cached_attention(query, key, value, key_cache, value_cache, past, scale, mask, no_alibi, no_window,
                                        causal);
    }
    StableIValue stack[] = {from(query), from(key),  from(value),    from(key_cache), from(value_cache), from(past),
                            from(scale), from(mask), from(no_alibi), from(no_window), from(causal)};
    return result_of("ds_plugin::cached_attention", stack);
  }

  Tensor cached_attention_int8(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                               const Tensor& value_cache, const Tensor& key_scales, const Tensor& value_scales,
                               int64_t past, double scale, const OptionalTensor& mask) const {
    const OptionalTensor no_alibi;
    const int64_t no_window = 0;
    const bool causal = !mask;
    if (functions.cached_attention_int8) {
      return functions.cached_attention_int8(query, key, value, key_cache, value_cache, key_scales, value_scales, past,
                                             scale, mask, no_alibi, no_window, causal);
    }
    StableIValue stack[] = {from(query),      from(key),          from(value),     from(key_cache), from(value_cache),
                            from(key_scales), from(value_scales), from(past),      from(scale),     from(mask),
                            from(no_alibi),   from(no_window),    from(causal)};
    return result_of("ds_plugin::cached_attention_int8", stack);
  }
};

struct Norm {
  OptionalTensor weight;  // none where nothing is normed
  OptionalTensor bias;    // none for an RMS norm
  double eps, weight_offset;

  Tensor of(const Ops& ops, const Tensor& input) const {
    if (!weight) return input;
    return bias ? ops.layer_norm(input, *weight, *bias, eps) : ops.rms_norm(input, *weight, eps, weight_offset);
  }
};

struct Matrix {
  OptionalTensor weight, bias, scales, offsets;

  Tensor of(const Ops& ops, const Tensor& input, const OptionalTensor& residual = {}, int64_t activation = 0,
            bool gated = false) const {
    return ops.linear(input, *weight, bias, scales, offsets, residual, activation, gated);
  }
};

// `heads` heads, each `step`-th from `first` on, of what one product has put out: [batch, tokens, heads of all kinds *
// head_dim] as [batch, heads, tokens, head_dim], in the same memory.
Tensor heads_of(const Tensor& all, int64_t first, int64_t heads, int64_t head_dim, int64_t step = 1) {
  const int64_t batch = all.size(0), tokens = all.size(1), row = all.size(2);
  const int64_t sizes[] = {batch, heads, tokens, head_dim}, strides[] = {tokens * row, step * head_dim, row, 1};
  AtenTensorHandle view;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(all.get(), 4, sizes, strides, first * head_dim, &view));
  return Tensor(view);
}

// `columns` columns from `first` on of [batch, tokens, all], in the same memory.
Tensor columns_of(const Tensor& all, int64_t first, int64_t columns) {
  const int64_t batch = all.size(0), tokens = all.size(1), row = all.size(2);
  const int64_t sizes[] = {batch, tokens, columns}, strides[] = {tokens * row, row, 1};
  AtenTensorHandle view;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(all.get(), 3, sizes, strides, first, &view));
  return Tensor(view);
}

// activation(gate) * up of [batch, tokens, gate and up].
Tensor gate_before_up(const Ops& ops, const Tensor& both, int64_t activation) {
  const int64_t columns = both.size(2) / 2;
  return ops.activation_and_mul(columns_of(both, 0, columns), columns_of(both, columns, columns), activation);
}

// `heads_of`, each normed; or all heads of a token normed as one, if the norm has as many weights.
Tensor normed_heads_of(const Ops& ops, const Norm& norm, const Tensor& all, int64_t first, int64_t heads,
                       int64_t head_dim, int64_t step) {
  if (!norm.weight || norm.weight->size(0) == head_dim) {
    return norm.of(ops, heads_of(all, first, heads, head_dim, step));
  }
  return heads_of(norm.of(ops, columns_of(all, first * head_dim, heads * head_dim)), 0, heads, head_dim);
}

// What heads have made, [batch, heads, tokens, head_dim] with tokens before heads in memory, as [batch, tokens, all].
Tensor side_by_side(const Tensor& heads) {
  const int64_t batch = heads.size(0), tokens = heads.size(2), row = heads.size(1) * heads.size(3);
  const int64_t sizes[] = {batch, tokens, row}, strides[] = {tokens * row, row, 1};
  AtenTensorHandle view;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(heads.get(), 3, sizes, strides, 0, &view));
  return Tensor(view);
}

// Of one layer; with scales they are int8.
struct Caches {
  const Tensor* all;  // keys, values, and their scales if there are any
  int64_t count, past;

  Tensor attend(const Ops& ops, const Tensor& query, const Tensor& key, const Tensor& value, double scale,
                const OptionalTensor& mask) const {
    if (count == 2) return ops.cached_attention(query, key, value, all[0], all[1], past, scale, mask);
    return ops.cached_attention_int8(query, key, value, all[0], all[1], all[2], all[3], past, scale, mask);
  }
};

// Which elements of a head angles turn together: none, the i-th of both halves, or neighbours.
enum Turn : int64_t { kNoTurn, kTurnHalves, kTurnPairs };

// What a layer is given next to hidden states and caches.
struct Given {
  const Ops& ops;
  OptionalTensor mask, cos, sin;

  void turn(const Tensor& heads, int64_t how) const {
    if (how != kNoTurn && cos && sin) ops.rotary_(heads, *cos, *sin, how == kTurnPairs);
  }
};

// The second half of what goes into the MLP is the gate, which linear applies; or the first one is, which it does not know.
enum Gate : int64_t { kNoGate, kGateSecond, kGateFirst };

// residual + multiplier * product of input, which is normed first if there is a norm for it.
Tensor added(const Ops& ops, const Matrix& matrix, const Norm& post_norm, double multiplier, const Tensor& input,
             const Tensor& residual) {
  if (!post_norm.weight && multiplier == 1.0) return matrix.of(ops, input, residual);
  return ops.sum_of(residual, post_norm.of(ops, matrix.of(ops, input)), multiplier);
}

// As Decoder in ds_plugin_sdk/integrations/transformers/decoder.py says.
struct Layer {
  Norm attention_norm, mlp_norm, query_norm, key_norm, attention_post_norm, mlp_post_norm;
  Matrix qkv, output, mlp_in, mlp_out;
  double scale, multiplier;
  int64_t heads, activation, gate, turn;
  bool norm_first, qkv_by_head, parallel;

  Tensor run(const Tensor& hidden, const Caches& caches, const Given& given) const {
    const Ops& ops = given.ops;
    const int64_t kv_heads = caches.all[0].size(1), head_dim = caches.all[0].size(3);
    Tensor normed = norm_first ? attention_norm.of(ops, hidden) : hidden;
    const Tensor all = qkv.of(ops, normed);
    if (all.dim() != 3 || all.size(2) != (heads + 2 * kv_heads) * head_dim) {
      reject("the cache has " + std::to_string(kv_heads) + " heads of " + std::to_string(head_dim) +
             " elements, which the layer's keys and values have not; expected a cache of this model");
    }
    const int64_t step = qkv_by_head ? 3 : 1, keys = qkv_by_head ? 1 : heads;
    const int64_t values = keys + (qkv_by_head ? 1 : kv_heads);
    const Tensor query = normed_heads_of(ops, query_norm, all, 0, heads, head_dim, step);
    const Tensor key = normed_heads_of(ops, key_norm, all, keys, kv_heads, head_dim, step);
    const Tensor value = heads_of(all, values, kv_heads, head_dim, step);
    if (query_norm.weight || qkv_by_head) {
      given.turn(query, turn);
      given.turn(key, turn);
    } else {
      given.turn(heads_of(all, 0, heads + kv_heads, head_dim), turn);
    }

    const Tensor attended = side_by_side(caches.attend(ops, query, key, value, scale, given.mask));
    Tensor sum = added(ops, output, attention_post_norm, multiplier, attended, hidden);
    if (!norm_first) sum = attention_norm.of(ops, sum);
    if (!parallel) {
      normed = norm_first ? mlp_norm.of(ops, sum) : sum;
    } else if (mlp_norm.weight) {
      normed = mlp_norm.of(ops, hidden);
    }
    const Tensor inner = gate == kGateFirst ? gate_before_up(ops, mlp_in.of(ops, normed), activation)
                                            : mlp_in.of(ops, normed, {}, activation, gate == kGateSecond);
    const Tensor result = added(ops, mlp_out, mlp_post_norm, multiplier, inner, sum);
    return norm_first ? result : mlp_norm.of(ops, result);
  }
};

// Takes layers off the lists of a call: ds_plugin_sdk/integrations/transformers/decoder.py puts them there, in this order.
class Layers {
 public:
  Layers(const std::vector<Tensor>& tensors, const std::vector<int64_t>& integers, const std::vector<double>& numbers)
      : tensors_(tensors), integers_(integers), numbers_(numbers) {}

  size_t count() const { return integers_.size() / kIntegers; }

  Layer next() {
    present_ = integer();
    Layer layer{};
    for (Norm* norm : {&layer.attention_norm, &layer.mlp_norm, &layer.query_norm, &layer.key_norm,
                       &layer.attention_post_norm, &layer.mlp_post_norm}) {
      norm->weight = tensor();
      norm->bias = tensor();
      norm->eps = number();
      norm->weight_offset = number();
    }
    for (Matrix* matrix : {&layer.qkv, &layer.output, &layer.mlp_in, &layer.mlp_out}) {
      for (OptionalTensor* part : {&matrix->weight, &matrix->bias, &matrix->scales, &matrix->offsets}) *part = tensor();
    }
    layer.scale = number();
    layer.multiplier = number();
    layer.heads = integer();
    layer.activation = integer();
    layer.gate = integer();
    layer.turn = integer();
    layer.norm_first = integer();
    layer.qkv_by_head = integer();
    layer.parallel = integer();
    const bool whole = layer.qkv.weight && layer.output.weight && layer.mlp_in.weight && layer.mlp_out.weight;
    if (!whole || present_ != 0) reject("a layer lacks a weight, or has one too many; expected four matrices");
    return layer;
  }

  // All layers were taken.
  void end() const {
    if (next_tensor_ == tensors_.size() && next_integer_ == integers_.size() && next_number_ == numbers_.size()) return;
    reject("the lists have more than their layers; expected what each layer has, and nothing else");
  }

 private:
  static constexpr size_t kIntegers = 8;

  template <class Value>
  static const Value& take(const std::vector<Value>& list, size_t& next) {
    if (next == list.size()) reject("the lists have less than their layers; expected all that each layer has");
    return list[next++];
  }
  int64_t integer() { return take(integers_, next_integer_); }
  double number() { return take(numbers_, next_number_); }
  // Bits tell which of a layer's tensors there are.
  OptionalTensor tensor() {
    const bool present = present_ & 1;
    present_ >>= 1;
    return present ? OptionalTensor(take(tensors_, next_tensor_)) : OptionalTensor();
  }

  const std::vector<Tensor>& tensors_;
  const std::vector<int64_t>& integers_;
  const std::vector<double>& numbers_;
  size_t next_tensor_ = 0, next_integer_ = 0, next_number_ = 0;
  int64_t present_ = 0;
};

// The masks and angles of all layers, and which each layer is given, as ds_plugin_sdk/ops/decoder_layer.py says.
class GivenToLayers {
 public:
  GivenToLayers(const Ops& ops, const std::vector<Tensor>& tensors, const std::vector<int64_t>& which, size_t layers)
      : ops_(ops), tensors_(tensors), which_(which) {
    if (which.size() == layers * kOfEach) return;
    reject(std::to_string(which.size()) + " numbers say what " + std::to_string(layers) +
           " layers are given; expected three for each");
  }

  int64_t past(size_t layer) const { return which_[layer * kOfEach]; }
  Given of(size_t layer) const {
    const int64_t *which = &which_[layer * kOfEach], mask = which[1], cos = which[2];
    return {ops_, at(mask), at(cos), cos < 0 ? OptionalTensor() : at(cos + 1)};
  }

 private:
  static constexpr size_t kOfEach = 3;

  OptionalTensor at(int64_t place) const {
    if (place < 0) return {};
    if (static_cast<size_t>(place) < tensors_.size()) return tensors_[place];
    reject("a layer is given tensor " + std::to_string(place) + " of " + std::to_string(tensors_.size()) +
           "; expected a place in the list, or -1");
  }

  const Ops& ops_;
  const std::vector<Tensor>& tensors_;
  const std::vector<int64_t>& which_;
};

std::vector<Tensor> decoder_layers(const Tensor& hidden, std::vector<Tensor> caches, std::vector<Tensor> given,
                                   std::vector<int64_t> which, int64_t functions, std::vector<Tensor> tensors,
                                   std::vector<int64_t> integers, std::vector<double> numbers) {
  const NoGrad guard;
  Ops ops{};
  if (functions && hidden.is_cpu()) ops.functions = *reinterpret_cast<const OpFunctions*>(functions);
  Layers layers(tensors, integers, numbers);
  const size_t count = layers.count(), of_each = count ? caches.size() / count : 0;
  if (count * of_each != caches.size() || (of_each != 2 && of_each != 4)) {
    reject(std::to_string(caches.size()) + " caches for " + std::to_string(count) +
           " layers; expected two of each, or four");
  }
  const GivenToLayers given_to(ops, given, which, count);
  std::vector<Tensor> results;
  results.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const Caches of_layer{&caches[i * of_each], static_cast<int64_t>(of_each), given_to.past(i)};
    results.push_back(layers.next().run(i ? results.back() : hidden, of_layer, given_to.of(i)));
  }
  layers.end();
  return results;
}

}  // namespace
}  // namespace ds_kernels

DS_KERNELS_EXPORTED const char* ds_kernels_headers_of_torch() { return ds_kernels::headers_of_torch(); }

// Functions of Python, which are given None: as_found.h.
#define DS_KERNELS_FUNCTION_OF_PYTHON(name)                                                        \
  DS_KERNELS_EXPORTED void* ds_kernels_##name(void* none) {                                        \
    using namespace ds_kernels::python;                                                            \
    static Method method = {#name, name##_function, kFastCall, nullptr};                           \
    return PyCFunction_NewEx(&method, none, nullptr);                                              \
  }
DS_KERNELS_FUNCTION_OF_PYTHON(as_found)
DS_KERNELS_FUNCTION_OF_PYTHON(places)
DS_KERNELS_FUNCTION_OF_PYTHON(samples)

STABLE_TORCH_LIBRARY_IMPL(ds_plugin_calls, CompositeExplicitAutograd, m) {
  m.impl("decoder_layers", TORCH_BOX(&ds_kernels::decoder_layers));
}
