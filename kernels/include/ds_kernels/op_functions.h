// Ops as functions that other libraries of the SDK call past torch's dispatcher, which takes longer than the work on one
// token's hidden states.
//
//   norm_binding.cpp:  DS_KERNELS_OP_FUNCTION(rms_norm, NormOps<Device>::rms_norm)
//
// ds_plugin_sdk/ops/_op_functions.py hands them from library to library. They are the kernels for host memory.
#pragma once

#include <cstring>

#include <ds_kernels/arguments.h>
#include <torch/headeronly/version.h>

namespace ds_kernels {

// Null where there is none. ds_plugin_sdk/ops/_op_functions.py has the same order.
struct OpFunctions {
  Tensor (*linear)(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& scales,
                   const OptionalTensor& offsets, const OptionalTensor& residual, int64_t activation, bool gated);
  Tensor (*layer_norm)(const Tensor& input, const Tensor& weight, const Tensor& bias, double eps);
  Tensor (*rms_norm)(const Tensor& input, const Tensor& weight, double eps, double weight_offset);
  Tensor (*activation_and_mul)(const Tensor& gate, const Tensor& up, int64_t activation);
  void (*rotary_)(const Tensor& input, const Tensor& cos, const Tensor& sin, bool interleaved);
  Tensor (*cached_attention)(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                             const Tensor& value_cache, int64_t past, double scale, const OptionalTensor& mask,
                             const OptionalTensor& alibi, int64_t window, bool causal);
  Tensor (*cached_attention_int8)(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                                  const Tensor& value_cache, const Tensor& key_scales, const Tensor& value_scales,
                                  int64_t past, double scale, const OptionalTensor& mask, const OptionalTensor& alibi,
                                  int64_t window, bool causal);
  void (*residual_add_bias_)(const Tensor& residual, const Tensor& hidden, const OptionalTensor& attention,
                             const OptionalTensor& attention_bias, const OptionalTensor& final_bias, double scale,
                             bool scale_attention);
};

// What two libraries must have in common to hand each other torch::stable::Tensor: torch's headers.
inline const char* headers_of_torch() { return TORCH_VERSION; }

}  // namespace ds_kernels

#define DS_KERNELS_EXPORTED extern "C" __attribute__((visibility("default")))

// Exports a function, of the type that OpFunctions has for it, to those who were compiled with the same headers.
#define DS_KERNELS_OP_FUNCTION(op, ...)                                                    \
  DS_KERNELS_EXPORTED void* ds_kernels_function_##op(const char* headers) {                \
    static constexpr decltype(ds_kernels::OpFunctions::op) function = &__VA_ARGS__;        \
    const bool same = std::strcmp(headers, ds_kernels::headers_of_torch()) == 0;           \
    return same ? reinterpret_cast<void*>(function) : nullptr;                             \
  }
