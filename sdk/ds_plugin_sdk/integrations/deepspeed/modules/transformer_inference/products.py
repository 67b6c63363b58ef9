"""Matrix products, alone and with the norm before them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.integrations.deepspeed.modules.transformer_inference.activations import ACTIVATIONS, GATES, chosen
from ds_plugin_sdk.ops import norm
from ds_plugin_sdk.ops.activation import Activation, bias_activation_
from ds_plugin_sdk.ops.activation import gated_activation as gated
from ds_plugin_sdk.ops.linear import linear
from ds_plugin_sdk.ops.residual import padded_head_dim


def _matmul(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    q_int8: bool,
    transpose: bool,
    bias: Tensor | None = None,
    activation: Activation = "identity",
    gate: bool = False,
) -> Tensor:
    """``activation(input @ weight + bias)``, or of its halves the first times the activation of the second."""
    if q_int8 and weight.dtype == torch.int8:
        groups = scale.shape[0]
        if transpose and groups % weight.shape[0] == 0:
            scales = scale.flatten()[:groups].view(weight.shape[0], -1)
            return linear(input, weight, bias, scales=scales, activation=activation, gated=gate)
        weight = dequantize(weight, scale, groups).to(input.dtype)
    if transpose:
        return linear(input, weight, bias, activation=activation, gated=gate)
    hidden = torch.matmul(input, weight)  # as it lies: transposing a weight takes longer than it saves
    if gate:
        return gated(hidden, bias, activation)
    return hidden if bias is None and activation == "identity" else bias_activation_(hidden, bias, activation)


def dequantize(weight: Tensor, scale: Tensor, groups: int) -> Tensor:
    """What int8 weights stand for: each of `groups` equal parts of their memory times its scale, in float16."""
    parts = weight.reshape(groups, -1).to(torch.float32) * scale.flatten()[:groups].to(torch.float32).unsqueeze(1)
    return parts.reshape(weight.shape).to(torch.float16)


def qkv_gemm(
    input: Tensor,
    weight: Tensor,
    q_scale: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    add_bias: bool,
    q_int8: bool,
    transpose: bool,
) -> list[Tensor]:
    """``LN(input) @ weight + bias``, and ``LN(input)``."""
    normed = norm.layer_norm(input, gamma, beta, eps)
    return [_matmul(normed, weight, q_scale, q_int8, transpose, bias if add_bias else None), normed]


def rms_qkv_gemm(
    input: Tensor, weight: Tensor, q_scale: Tensor, gamma: Tensor, eps: float, q_int8: bool, transpose: bool
) -> list[Tensor]:
    """``RMS(input) @ weight``, and ``RMS(input)``."""
    normed = norm.rms_norm(input, gamma, eps)
    return [_matmul(normed, weight, q_scale, q_int8, transpose), normed]


def mlp_gemm(
    input: Tensor,
    residual: Tensor,
    input_bias: Tensor | None,
    weight_interm: Tensor,
    weight_out: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    pre_layer_norm: bool,
    mlp_after_attn: bool,
    interm_scale: Tensor,
    out_scale: Tensor,
    q_int8: bool,
    activation: int,
    transpose: bool,
) -> list[Tensor]:
    """``activation(n @ weight_interm + bias) @ weight_out``, and n.

    n is the layer norm of ``input + residual + input_bias`` if `mlp_after_attn`, else of `residual`. Activation 1 is
    GELU by tanh, 2 is ReLU.
    """
    if mlp_after_attn:
        normed = norm.post_layer_norm(input, residual, gamma, beta, eps, input_bias=input_bias)
    else:
        normed = norm.layer_norm(residual, gamma, beta, eps)
    function = chosen(ACTIVATIONS, activation)
    hidden = _matmul(normed, weight_interm, interm_scale, q_int8, transpose, bias, function)
    return [_matmul(hidden, weight_out, out_scale, q_int8, transpose), normed]


def rms_mlp_gemm(
    input: Tensor,
    residual: Tensor,
    weight_interm: Tensor,
    weight_out: Tensor,
    gamma: Tensor,
    eps: float,
    interm_scale: Tensor,
    out_scale: Tensor,
    q_int8: bool,
    activation: int,
    transpose: bool,
) -> list[Tensor]:
    """``activation(RMS(input + residual) @ weight_interm) @ weight_out``, and ``input + residual``.

    `residual` stays as it is, for the caller adds `input` to it itself.

    Activations 3 and 4 are gates, as in `gated_activation`.
    """
    normed, total = norm.pre_rms_norm(input, residual, gamma, eps)
    gate = int(activation) in GATES
    function = chosen({**ACTIVATIONS, **GATES}, activation)
    hidden = _matmul(normed, weight_interm, interm_scale, q_int8, transpose, None, function, gate)
    return [_matmul(hidden, weight_out, out_scale, q_int8, transpose), total]


def vector_matmul(
    input: Tensor, weight: Tensor, async_op: bool, q_scale: Tensor, q_int8: bool, transpose: bool
) -> Tensor:
    """``input @ weight``."""
    return _matmul(input, weight, q_scale, q_int8, transpose)


def linear_layer(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    add_bias: bool,
    do_flash_attn: bool,
    num_heads: int,
    transpose: bool,
    rope_theta: float,
) -> Tensor:
    """``input @ weight + bias``, for flash attention as ``[3, batch, num_heads, tokens, head_dim]``.

    There head_dim is padded with zeros unless it is a multiple of 64, see `ds_plugin_sdk.ops.residual.padded_head_dim`.
    """
    output = _matmul(input, weight, input.new_empty(1), False, transpose, bias if add_bias else None)
    if not do_flash_attn:
        return output
    heads = output.view(*output.shape[:2], 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    head_dim = heads.shape[-1]
    padding = padded_head_dim(head_dim) - head_dim if head_dim % 64 else 0
    return functional.pad(heads, (0, padding)).contiguous()


def fused_gemm_gelu(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    weight_out: Tensor,
    out_scale: Tensor,
    q_int8: bool,
    transpose: bool,
) -> Tensor:
    """``gelu(input @ weight + bias) @ weight_out``, GELU by tanh."""
    hidden = _matmul(input, weight, scale, q_int8, transpose, bias, "gelu_tanh")
    return _matmul(hidden, weight_out, out_scale, q_int8, transpose)
