"""``transformer_inference``: what DeepSpeed's injected transformer layers call (its ``InferenceBuilder``).

DeepSpeed asks for each function under a name for each dtype, ``softmax_fp16`` and so on; here one function serves all,
since the tensors say what they are. Positions of arguments, and what is modified in place, are DeepSpeed's; unused
arguments (streams, scratch memory, autotuning) are named and ignored. What a function returns is always its own.

An absent mask or alibi is a tensor of one dimension, as DeepSpeed has it. Weights are ``[in, out]``, or ``[out, in]``
if `transpose`. Weights in int8 come with `scale`, whose first dimension says into how many equal parts the weight's
memory is cut, and whose first elements are the parts' scales.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk import registry
from ds_plugin_sdk.errors import OpError
from ds_plugin_sdk.ops import norm as norms
from ds_plugin_sdk.ops import residual as residuals
from ds_plugin_sdk.ops.activation import Activation, bias_activation, bias_activation_
from ds_plugin_sdk.ops.activation import gated_activation as gated
from ds_plugin_sdk.ops.attention import cached_attention
from ds_plugin_sdk.ops.linear import linear
from ds_plugin_sdk.ops.rotary import angles, rotary
from ds_plugin_sdk.ops.softmax import softmax as attention_softmax
from ds_plugin_sdk.ops.softmax import softmax_ as attention_softmax_

# deepspeed.utils.types.ActivationFuncType
_ACTIVATIONS: dict[int, Activation] = {1: "gelu_tanh", 2: "relu"}
_GATES: dict[int, Activation] = {3: "gelu", 4: "silu"}


# ---- keys and values of earlier tokens -------------------------------------------------------------------------------


@dataclass
class _Layer:
    """The cache of one layer: ``[batch, kv_heads, room, head_dim]`` each, of which `length` positions are filled."""

    keys: Tensor
    values: Tensor
    length: int = 0


@dataclass
class _Workspace:
    """The caches of all layers; each is made when its first tokens come, for then its shape is known.

    Each layer counts its own tokens, so that models may take turns.
    """

    room: int = 1024  # DeepSpeed's default for max_out_tokens
    layers: dict[int, _Layer] = field(default_factory=dict)

    def layer(self, number: int, key: Tensor, new_sequence: bool) -> _Layer:
        """The cache of a layer for keys ``[batch, kv_heads, tokens, head_dim]``."""
        batch, kv_heads, tokens, head_dim = key.shape
        layer = self.layers.get(number)
        if layer is None or (new_sequence and not self._fits(layer, key)):
            shape = (batch, kv_heads, self.room, head_dim)
            layer = self.layers[number] = _Layer(key.new_empty(shape), key.new_empty(shape))
        if new_sequence:
            layer.length = 0
        if layer.length + tokens > self.room:
            raise OpError(
                "the sequence is longer than the cache of keys and values",
                op="softmax_context",
                why=f"{layer.length} tokens are in it, {tokens} are added, and there is room for {self.room}",
                hint="deepspeed.init_inference(max_out_tokens=...)",
            )
        return layer

    def _fits(self, layer: _Layer, key: Tensor) -> bool:
        batch, kv_heads, _, head_dim = key.shape
        cache = layer.keys
        return (
            cache.shape[0] >= batch
            and cache.shape[1:] == (kv_heads, self.room, head_dim)
            and (cache.dtype, cache.device) == (key.dtype, key.device)
        )


_workspace = _Workspace()


def _allocate(
    dtype: torch.dtype,
    hidden: int,
    num_heads: int,
    prompt_length: int,
    batch: int,
    num_layers: int,
    mp_size: int,
    external_cache: bool,
    max_out_tokens: int,
    min_out_tokens: int,
) -> None:
    _workspace.room = max_out_tokens
    if external_cache:
        return
    token = 2 * num_layers * batch * hidden // max(mp_size, 1) * dtype.itemsize
    available = registry.get_accelerator().available_memory()
    if min_out_tokens * token > available:
        raise RuntimeError(
            f"ds-plugin-sdk: there is no room for the keys and values of {min_out_tokens} tokens (min_out_tokens): "
            f"a token of this batch takes {token} bytes, and {available} are free. Use a smaller batch."
        )


def allocate_workspace_fp32(
    hidden: int,
    num_heads: int,
    prompt_length: int,
    batch: int,
    num_layers: int,
    mp_size: int,
    external_cache: bool,
    rank: int,
    max_out_tokens: int,
    min_out_tokens: int,
) -> None:
    """Make ready for sequences of up to `max_out_tokens`; memory is taken layer by layer, at first use.

    Args:
        external_cache: the caller keeps keys and values itself.

    Raises:
        RuntimeError: not even `min_out_tokens` tokens would fit into the device's free memory.
    """
    sizes = (hidden, num_heads, prompt_length, batch, num_layers, mp_size, external_cache)
    _allocate(torch.float32, *sizes, max_out_tokens, min_out_tokens)


def allocate_workspace_bf16(
    hidden: int,
    num_heads: int,
    prompt_length: int,
    batch: int,
    num_layers: int,
    mp_size: int,
    external_cache: bool,
    rank: int,
    max_out_tokens: int,
    min_out_tokens: int,
) -> None:
    """`allocate_workspace_fp32` for elements of two bytes."""
    sizes = (hidden, num_heads, prompt_length, batch, num_layers, mp_size, external_cache)
    _allocate(torch.bfloat16, *sizes, max_out_tokens, min_out_tokens)


allocate_workspace_fp16 = allocate_workspace_bf16


def release_workspace() -> None:
    """Give the caches' memory back."""
    _workspace.layers.clear()


def retake_workspace() -> bool:
    """After `release_workspace`: caches are made again when tokens come. True: there is a workspace."""
    return True


def reset_cache() -> None:
    """Forget all tokens: the next one begins a sequence."""
    for layer in _workspace.layers.values():
        layer.length = 0


def repeat_kv_cache(source_batch: int, repeats: int) -> list[Tensor]:
    """Go on with each row of the batch `repeats` times, after one prompt for all of them.

    Returns:
        Keys and values of each layer in turn, ``[source_batch * repeats, kv_heads, tokens, head_dim]``, views.

    Raises:
        RuntimeError: there has been no prompt.
    """
    if not any(layer.length for layer in _workspace.layers.values()):
        raise RuntimeError("ds-plugin-sdk: the cache of keys and values is empty; run the prompt before repeating it")
    views = []
    for layer in _workspace.layers.values():
        shape = (source_batch * repeats, *layer.keys.shape[1:])
        for name in ("keys", "values"):
            filled = getattr(layer, name)[:source_batch, :, : layer.length].repeat_interleave(repeats, dim=0)
            cache = filled.new_empty(shape)
            cache[:, :, : layer.length] = filled
            setattr(layer, name, cache)
            views.append(cache[:, :, : layer.length])
    return views


repeat_kv_cache_fp32 = repeat_kv_cache_fp16 = repeat_kv_cache_bf16 = repeat_kv_cache


# ---- attention -------------------------------------------------------------------------------------------------------


def softmax(
    scores: Tensor,
    mask: Tensor,
    alibi: Tensor,
    triangular: bool,
    recompute: bool,
    local_attention: bool,
    window_size: int,
    async_op: bool,
    layer_scale: float,
    head_offset: int,
    mp_size: int,
) -> Tensor:
    """Softmax of ``layer_scale * scores + alibi + mask`` over keys, in place where `scores` is contiguous.

    Args:
        scores: ``[batch, heads, queries, keys]``.
        mask: ``[batch, keys]``, ``[batch, queries, keys]`` or four dimensions; is added.
        alibi: ``[batch * heads * mp_size, 1 or queries, keys]``, or the same without batch, for the heads of all
            ranks; is added.
        triangular: keys after the query take no part; the last query stands at the last key.
        local_attention: only the last `window_size` keys take part.
        head_offset: number of this rank's first head.

    Returns:
        scores, or a new tensor.
    """
    heads, keys = scores.shape[1], scores.shape[3]
    options = {"scale": layer_scale, "causal": triangular, "window": window_size if local_attention else 0}
    biases = None
    if alibi is not None and alibi.dim() > 1:
        rows = alibi.reshape(-1, heads * mp_size, alibi.shape[-2], keys)  # a batch of 1 serves all
        biases = rows[:, head_offset : head_offset + heads].to(scores.dtype)
    function = attention_softmax_ if scores.is_contiguous() else attention_softmax
    return function(scores, _mask_for(mask, scores.dtype), biases, **options)  # type: ignore[arg-type]  # of three types


softmax_fp32 = softmax_fp16 = softmax_bf16 = softmax


def softmax_context(
    qkv: Tensor,
    mask: Tensor,
    rotary_dim: int,
    rotate_half: bool,
    rotate_every_two: bool,
    heads: int,
    num_kv: int,
    norm_factor: float,
    triangular: bool,
    local_attention: bool,
    window_size: int,
    no_masking: bool,
    layer_id: int,
    num_layers: int,
    alibi: Tensor,
    rope_theta: float,
    is_prompt: bool,
    token_idx: Tensor | None,
    position_ids: Tensor | None,
) -> list[Tensor]:
    """Attention of new tokens to themselves and to those in the layer's cache, which they are appended to.

    Several tokens at once are a prompt and begin a sequence; a single one continues it (or begins it, where the cache
    is empty, or `mask` is for fewer positions than it holds).

    Args:
        qkv: ``[batch, tokens, (heads + 2 * kv_heads) * head_dim]``, a contiguous block each of queries, keys, values.
        mask: as in `softmax`; for all positions, or more.
        rotary_dim: how many elements of a head carry the position; none if not positive.
        rotate_half: pair element i with i + rotary_dim / 2; else with its neighbour.
        num_kv: heads of keys and values; as many as `heads` if not positive.
        norm_factor: its square is the scale of the scores.
        alibi: ``[batch * heads, 1 or tokens, positions]``; is added.
        rope_theta: base of the rotary angles.
        position_ids: ``[batch, tokens]`` for the rotary angles; counted on from the cache if None.

    Returns:
        The context ``[batch, tokens, heads * head_dim]``, and the filled parts of the layer's cache, views
        ``[batch, kv_heads, positions, head_dim]``.

    Raises:
        OpError: the sequence is longer than ``max_out_tokens``.
    """
    batch, tokens, width = qkv.shape
    kv_heads = num_kv if num_kv > 0 else heads
    head_dim = width // (heads + 2 * kv_heads)
    split = qkv.view(batch, tokens, heads + 2 * kv_heads, head_dim).transpose(1, 2)
    query, key, value = (
        split.narrow(1, first, n) for first, n in ((0, heads), (heads, kv_heads), (-kv_heads, kv_heads))
    )
    added = None if no_masking else _mask_for(mask, qkv.dtype)
    layer = _workspace.layer(layer_id, key, tokens > 1 or _begins(layer_id, added))
    past, layer.length = layer.length, layer.length + tokens
    if rotary_dim > 0:
        if position_ids is None:
            position_ids = torch.arange(past, past + tokens, device=qkv.device)
        cos, sin = angles(position_ids, rotary_dim, rope_theta)
        query, key = (rotary(each, cos, sin, interleaved=not rotate_half) for each in (query, key))
    if alibi is not None and alibi.dim() > 1:
        biases = alibi.reshape(-1, heads, alibi.shape[-2], alibi.shape[-1])[..., : layer.length].to(qkv.dtype)
        added = biases if added is None else biases + added[..., : layer.length]
    context = cached_attention(
        query,
        key,
        value,
        layer.keys[:batch],
        layer.values[:batch],
        past,
        scale=norm_factor * norm_factor,
        mask=added,
        window=window_size if local_attention else 0,
        causal=triangular,
    )
    filled = (cache[:batch, :, : layer.length] for cache in (layer.keys, layer.values))
    return [context.transpose(1, 2).flatten(2), *filled]


softmax_context_fp32 = softmax_context_fp16 = softmax_context_bf16 = softmax_context_int8 = softmax_context


def _begins(layer_id: int, mask: Tensor | None) -> bool:
    """Whether a single token begins a sequence: its mask has no room for what the cache holds."""
    layer = _workspace.layers.get(layer_id)
    return layer is not None and mask is not None and mask.shape[-1] <= layer.length


def _mask_for(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask in four dimensions, of a dtype that can be added to scores of `dtype`; None if there is none."""
    if mask is None or mask.dim() == 1:
        return None
    if mask.dtype not in (dtype, torch.float32):
        mask = mask.to(dtype)
    return mask if mask.dim() == 4 else mask.reshape(mask.shape[0], 1, -1, mask.shape[-1])


def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, rotary_dim: int, offset: int, num_heads: int, rotate_half: bool, rope_theta: float
) -> list[Tensor]:
    """Rotary embedding of ``[batch, tokens, num_heads * head_dim]``, the first token at position `offset`."""
    positions = torch.arange(offset, offset + query.shape[1], device=query.device)
    cos, sin = angles(positions, rotary_dim, rope_theta)
    heads = (each.view(*each.shape[:2], num_heads, -1).transpose(1, 2) for each in (query, key))
    return [rotary(each, cos, sin, interleaved=not rotate_half).transpose(1, 2).flatten(2) for each in heads]


# ---- norms -----------------------------------------------------------------------------------------------------------


def layer_norm(input: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Layer norm, of gamma's dtype."""
    return norms.layer_norm(input.to(gamma.dtype), gamma, beta, eps)


layer_norm_fp32 = layer_norm_fp16 = layer_norm_bf16 = layer_norm


def _layer_norm_residual(
    input: Tensor, bias: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, eps: float
) -> Tensor:
    """Layer norm of ``input + bias + residual``."""
    return norms.post_layer_norm(input, residual, gamma, beta, eps, input_bias=bias)


def layer_norm_residual_store_pre_ln_res(
    input: Tensor, bias: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, eps: float
) -> list[Tensor]:
    """Layer norm of ``input + bias + residual``, and that sum."""
    return list(norms.pre_layer_norm(input, residual, gamma, beta, eps, input_bias=bias))


def rms_norm(input: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """RMS norm, of gamma's dtype."""
    return norms.rms_norm(input.to(gamma.dtype), gamma, eps)


def pre_rms_norm(input: Tensor, residual: Tensor, gamma: Tensor, eps: float) -> list[Tensor]:
    """RMS norm of ``input + residual``, and that sum."""
    return list(norms.pre_rms_norm(input.to(gamma.dtype), residual.to(gamma.dtype), gamma, eps))


# ---- activations -----------------------------------------------------------------------------------------------------


def bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    """GELU by tanh of ``input + bias``, in place where `input` is contiguous."""
    return _bias_activation(input, bias, "gelu_tanh")


def bias_relu(input: Tensor, bias: Tensor) -> Tensor:
    """ReLU of ``input + bias``, in place where `input` is contiguous."""
    return _bias_activation(input, bias, "relu")


def bias_add(input: Tensor, bias: Tensor) -> Tensor:
    """``input + bias``, in place where `input` is contiguous."""
    return _bias_activation(input, bias, "identity")


def _bias_activation(input: Tensor, bias: Tensor, activation: Activation) -> Tensor:
    return (bias_activation_ if input.is_contiguous() else bias_activation)(input, bias.flatten(), activation)


bias_gelu_fp32 = bias_gelu_fp16 = bias_gelu_bf16 = bias_gelu
bias_relu_fp32 = bias_relu_fp16 = bias_relu_bf16 = bias_relu
bias_add_fp32 = bias_add_fp16 = bias_add_bf16 = bias_add


def gated_activation(input: Tensor, bias: Tensor, activation: int) -> Tensor:
    """First half of ``input + bias`` times the activation of the second: 3 is GELU (by erf), 4 is SiLU."""
    return gated(input, bias.flatten(), _activation(_GATES, activation))


def _activation(known: dict[int, Activation], number: int) -> Activation:
    try:
        return known[int(number)]
    except KeyError:
        raise OpError(
            "there is no such activation",
            op="transformer_inference",
            why=f"its number is {int(number)}; known here: {', '.join(f'{n} ({name})' for n, name in known.items())}",
        ) from None


# ---- matrix products -------------------------------------------------------------------------------------------------


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
    hidden = torch.matmul(input, weight)  # as it lies: turning a weight costs more than it saves
    if gate:
        return gated(hidden, bias, activation)
    return hidden if bias is None and activation == "identity" else bias_activation_(hidden, bias, activation)


def dequantize(weight: Tensor, scale: Tensor, groups: int) -> Tensor:
    """What int8 weights stand for: each of `groups` equal parts of their memory times its scale, in float16."""
    parts = weight.reshape(groups, -1).to(torch.float32) * scale.flatten()[:groups].to(torch.float32).unsqueeze(1)
    return parts.reshape(weight.shape).to(torch.float16)


dequantize_fp32 = dequantize_fp16 = dequantize_bf16 = dequantize


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
    normed = norms.layer_norm(input, gamma, beta, eps)
    return [_matmul(normed, weight, q_scale, q_int8, transpose, bias if add_bias else None), normed]


qkv_gemm_fp32 = qkv_gemm_fp16 = qkv_gemm_bf16 = qkv_gemm


def rms_qkv_gemm(
    input: Tensor, weight: Tensor, q_scale: Tensor, gamma: Tensor, eps: float, q_int8: bool, transpose: bool
) -> list[Tensor]:
    """``RMS(input) @ weight``, and ``RMS(input)``."""
    normed = norms.rms_norm(input, gamma, eps)
    return [_matmul(normed, weight, q_scale, q_int8, transpose), normed]


rms_qkv_gemm_fp32 = rms_qkv_gemm_fp16 = rms_qkv_gemm_bf16 = rms_qkv_gemm


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
        normed = norms.post_layer_norm(input, residual, gamma, beta, eps, input_bias=input_bias)
    else:
        normed = norms.layer_norm(residual, gamma, beta, eps)
    chosen = _activation(_ACTIVATIONS, activation)
    hidden = _matmul(normed, weight_interm, interm_scale, q_int8, transpose, bias, chosen)
    return [_matmul(hidden, weight_out, out_scale, q_int8, transpose), normed]


mlp_gemm_fp32 = mlp_gemm_fp16 = mlp_gemm_bf16 = mlp_gemm


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
    """``activation(RMS(input + residual) @ weight_interm) @ weight_out``, and `residual`, which `input` is added to.

    Activations 3 and 4 are gates, as in `gated_activation`.
    """
    normed, total = norms.pre_rms_norm(input, residual, gamma, eps)
    residual.copy_(total)
    gate = int(activation) in _GATES
    chosen = _activation({**_ACTIVATIONS, **_GATES}, activation)
    hidden = _matmul(normed, weight_interm, interm_scale, q_int8, transpose, None, chosen, gate)
    return [_matmul(hidden, weight_out, out_scale, q_int8, transpose), residual]


rms_mlp_gemm_fp32 = rms_mlp_gemm_fp16 = rms_mlp_gemm_bf16 = rms_mlp_gemm


def vector_matmul(
    input: Tensor, weight: Tensor, async_op: bool, q_scale: Tensor, q_int8: bool, transpose: bool
) -> Tensor:
    """``input @ weight``."""
    return _matmul(input, weight, q_scale, q_int8, transpose)


vector_matmul_fp32 = vector_matmul_fp16 = vector_matmul_bf16 = vector_matmul_int8 = vector_matmul


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
    padding = residuals.padded_head_dim(head_dim) - head_dim if head_dim % 64 else 0
    return functional.pad(heads, (0, padding)).contiguous()


linear_layer_fp32 = linear_layer_fp16 = linear_layer_bf16 = linear_layer


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


fused_gemm_gelu_fp32 = fused_gemm_gelu_fp16 = fused_gemm_gelu_bf16 = fused_gemm_gelu_int8 = fused_gemm_gelu


# ---- residuals and the rest ------------------------------------------------------------------------------------------


def residual_add_bias(
    hidden: Tensor,
    residual: Tensor,
    attention_output: Tensor,
    attention_bias: Tensor | None,
    final_bias: Tensor | None,
    mp_size: int,
    mlp_after_attn: bool,
    add_bias: bool,
    pre_layer_norm: bool,
) -> Tensor:
    """Add the layer's outputs to `residual`, in place, and return it.

    ====================================  ========================================================================
    `mlp_after_attn`, `pre_layer_norm`    hidden + (residual + attention_output + attention_bias + final_bias) / mp_size
    `mlp_after_attn`, no `pre_...`        hidden + residual + final_bias
    no `mlp_after_attn`                   hidden + attention_output
                                          + (residual + final_bias + [attention_bias if `add_bias`]) / mp_size
    ====================================  ========================================================================
    """
    if mlp_after_attn and not pre_layer_norm:
        return residuals.residual_add_bias_(residual, hidden, None, None, final_bias)
    return residuals.residual_add_bias_(
        residual,
        hidden,
        attention_output,
        attention_bias if mlp_after_attn or add_bias else None,
        final_bias,
        scale=1 / mp_size,
        scale_attention=mlp_after_attn,
    )


residual_add_bias_fp32 = residual_add_bias_fp16 = residual_add_bias_bf16 = residual_add_bias


def _vector_add(a: Tensor, b: Tensor, gamma: float) -> Tensor:
    """``gamma * a + b`` in `a`, which is returned."""
    return residuals.residual_add_bias_(a, b, scale=gamma)


def bias_residual(output: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
    """`output` as it is: DeepSpeed's own kernel adds nothing either."""
    return output


bias_residual_fp32 = bias_residual_fp16 = bias_residual_bf16 = bias_residual


def moe_res_matmul(residual: Tensor, coef: Tensor, output: Tensor) -> Tensor:
    """``output * coef[H:] + residual * coef[:H]`` in `output`, which is returned; `coef` has 2 H elements.

    Coefficients of each token, ``[..., 2]``, as a residual mixture of experts has them, serve their token.
    """
    if coef.shape == (*output.shape[:-1], 2):
        return output.mul_(coef[..., 1:]).add_(residual * coef[..., :1])
    return residuals.moe_res_matmul_(output, residual, coef.flatten())


def einsum_sec_sm_ecm(dispatch: Tensor, tokens: Tensor) -> Tensor:
    """``sum over s of dispatch[s, e, c] * tokens[s, m]``, ``[e, c, m]``."""
    return residuals.einsum_sec_sm_ecm(dispatch, tokens)


einsum_sec_sm_ecm_fp32 = einsum_sec_sm_ecm_fp16 = einsum_sec_sm_ecm_bf16 = einsum_sec_sm_ecm


def pad_transform(query: Tensor, key: Tensor, value: Tensor, heads: int, add_padding: bool) -> list[Tensor]:
    """Heads split, and padded if told so: see `ds_plugin_sdk.ops.residual.pad_transform`."""
    return list(residuals.pad_transform(query, key, value, heads, add_padding))


pad_transform_fp32 = pad_transform_fp16 = pad_transform_bf16 = pad_transform


def add_padding(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """`pad_transform` with padding, of tensors whose heads are split already."""
    flat = [each.transpose(1, 2).flatten(2) for each in (query, key, value)]
    return pad_transform(flat[0], flat[1], flat[2], query.shape[1], True)


add_padding_fp32 = add_padding_fp16 = add_padding_bf16 = add_padding
