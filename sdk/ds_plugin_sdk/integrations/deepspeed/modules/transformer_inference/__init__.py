"""``transformer_inference``: what DeepSpeed's injected transformer layers call (its ``InferenceBuilder``).

DeepSpeed asks for each function under a name for each dtype, ``softmax_fp16`` and so on; here one function serves all,
since the tensors say what they are. Positions of arguments, and what is modified in place, are DeepSpeed's; unused
arguments (streams, scratch memory, autotuning) are named and ignored. What a function returns is always its own.

An absent mask or alibi is a tensor of one dimension, as DeepSpeed has it. Weights are ``[in, out]``, or ``[out, in]``
if `transpose`. Weights in int8 come with `scale`, whose first dimension says into how many equal parts the weight's
memory is cut, and whose first elements are the parts' scales.
"""

from __future__ import annotations

from ds_plugin_sdk.integrations.deepspeed.modules.transformer_inference.activations import (
    bias_add,
    bias_gelu,
    bias_relu,
    gated_activation,
)
from ds_plugin_sdk.integrations.deepspeed.modules.transformer_inference.attention import (
    apply_rotary_pos_emb,
    softmax,
    softmax_context,
)
from ds_plugin_sdk.integrations.deepspeed.modules.transformer_inference.norms import (
    _layer_norm_residual,
    layer_norm,
    layer_norm_residual_store_pre_ln_res,
    pre_rms_norm,
    rms_norm,
)
from ds_plugin_sdk.integrations.deepspeed.modules.transformer_inference.products import (
    dequantize,
    fused_gemm_gelu,
    linear_layer,
    mlp_gemm,
    qkv_gemm,
    rms_mlp_gemm,
    rms_qkv_gemm,
    vector_matmul,
)
from ds_plugin_sdk.integrations.deepspeed.modules.transformer_inference.residuals import (
    _vector_add,
    add_padding,
    bias_residual,
    einsum_sec_sm_ecm,
    moe_res_matmul,
    pad_transform,
    residual_add_bias,
)
from ds_plugin_sdk.integrations.deepspeed.modules.transformer_inference.workspace import (
    allocate_workspace_bf16,
    allocate_workspace_fp16,
    allocate_workspace_fp32,
    release_workspace,
    repeat_kv_cache,
    reset_cache,
    retake_workspace,
)

_OF_EACH_DTYPE = (
    add_padding,
    bias_add,
    bias_gelu,
    bias_relu,
    bias_residual,
    dequantize,
    einsum_sec_sm_ecm,
    fused_gemm_gelu,
    layer_norm,
    linear_layer,
    mlp_gemm,
    pad_transform,
    qkv_gemm,
    repeat_kv_cache,
    residual_add_bias,
    rms_mlp_gemm,
    rms_qkv_gemm,
    softmax,
    softmax_context,
    vector_matmul,
)
globals().update({f"{each.__name__}_{t}": each for each in _OF_EACH_DTYPE for t in ("fp32", "fp16", "bf16")})
globals().update({f"{each.__name__}_int8": each for each in (fused_gemm_gelu, softmax_context, vector_matmul)})

__all__ = [
    "_layer_norm_residual",
    "_vector_add",
    "add_padding",
    "allocate_workspace_bf16",
    "allocate_workspace_fp16",
    "allocate_workspace_fp32",
    "apply_rotary_pos_emb",
    "bias_add",
    "bias_gelu",
    "bias_relu",
    "bias_residual",
    "dequantize",
    "einsum_sec_sm_ecm",
    "fused_gemm_gelu",
    "gated_activation",
    "layer_norm",
    "layer_norm_residual_store_pre_ln_res",
    "linear_layer",
    "mlp_gemm",
    "moe_res_matmul",
    "pad_transform",
    "pre_rms_norm",
    "qkv_gemm",
    "release_workspace",
    "repeat_kv_cache",
    "reset_cache",
    "residual_add_bias",
    "retake_workspace",
    "rms_mlp_gemm",
    "rms_norm",
    "rms_qkv_gemm",
    "softmax",
    "softmax_context",
    "vector_matmul",
]
