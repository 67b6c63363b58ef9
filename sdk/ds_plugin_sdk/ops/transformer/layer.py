"""A whole transformer layer, forward and backward, with what lies between spelled out: what is kept, and what is not.

DeepSpeed's functions and `ds_plugin_sdk.nn.TransformerLayer` both are these two. Matrix products are torch's, and so is
attention where torch has a kernel that is faster than plain products around a fused softmax; the rest is
`ds_plugin_sdk.ops.transformer`.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.ops import _library, _torch_attention
from ds_plugin_sdk.ops._products import product
from ds_plugin_sdk.ops.transformer import new_seed

OP = "transformer layer"


@dataclass(frozen=True)
class LayerConfig:
    """What a layer is, beside its weights.

    Attributes:
        heads: of the attention; divides the hidden size.
        attn_dropout: share of the attention's weights that is dropped in training.
        hidden_dropout: the same of what each half of the layer adds to its input.
        eps: added to the variance in the norms.
        pre_layer_norm: norms stand before attention and feed-forward, not after.
        tanh: gelu by the tanh formula, not by the error function.
        attn_dropout_checkpoint: keep the attention's weights before dropout only, and drop again in the backward pass.
        normalize_invertible: do not keep the input of a norm, but regain it from the output. No element of a norm's
            weight may be 0.
        gelu_checkpoint: do not keep the output of gelu, but compute it again.
        seed: layers that differ in it drop other elements; what they drop also follows `torch.manual_seed`.
    """

    heads: int
    attn_dropout: float = 0.0
    hidden_dropout: float = 0.0
    eps: float = 1e-12
    pre_layer_norm: bool = True
    tanh: bool = True
    attn_dropout_checkpoint: bool = False
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    seed: int = 0

    def in_evaluation(self) -> LayerConfig:
        """The layer without dropout; and without inverting, since memory is not short where nothing is trained."""
        return replace(self, attn_dropout=0.0, hidden_dropout=0.0, normalize_invertible=False)


class Weights(NamedTuple):
    """A layer's parameters, of one dtype, in DeepSpeed's order and by its names. H hidden size, I intermediate size."""

    attn_qkvw: Tensor  # [3 H, H]: queries, keys, values
    attn_qkvb: Tensor  # [3 H]
    attn_ow: Tensor  # [H, H]
    attn_ob: Tensor  # [H]
    attn_nw: Tensor  # [H]: the norm between attention and feed-forward
    attn_nb: Tensor  # [H]
    inter_w: Tensor  # [I, H]
    inter_b: Tensor  # [I]
    output_w: Tensor  # [H, I]
    output_b: Tensor  # [H]
    norm_w: Tensor  # [H]: the first norm if norms stand before, else the last
    norm_b: Tensor  # [H]


class SavedTensors(NamedTuple):
    """What the backward pass wants of the forward pass. A tensor without elements where nothing is kept."""

    qkv: Tensor  # [B, S, 3 H]
    probs: Tensor  # softmax [B, heads, S, S]; or where torch's attention ran, the sums that it keeps: [B, heads, S]
    dropped: Tensor  # the same after dropout; `probs` itself if it is to be made again
    context: Tensor  # [B, S, H], the attention's result
    attn_sum: Tensor  # [B, S, H], input of the norm between attention and feed-forward
    attn_normed: Tensor  # [B, S, H], its output
    inter: Tensor  # [B, S, I], input of bias and gelu
    gelu: Tensor  # [B, S, I], output of gelu; `inter` itself if it is to be made again
    normed: Tensor  # [B, S, H]: output of the norm before attention, or input of the last norm
    attn_seed: Tensor  # what torch's attention keeps of its random numbers, where it ran
    attn_offset: Tensor
    seeds: Tensor  # int64 [3]: of the attention's dropout, where it is ours, and of the two halves'
    attn_mean: Tensor  # [B, S] of the norm between attention and feed-forward
    attn_rstd: Tensor
    mean: Tensor  # [B, S] of the other norm
    rstd: Tensor


def forward(layer: LayerConfig, input: Tensor, mask: Tensor | None, weights: Weights) -> tuple[Tensor, SavedTensors]:
    """The layer's result, ``[B, S, H]``, and what `backward` wants.

    Norms before (x the input, A the attention of heads with scores ``q k^T / sqrt(H / heads) + mask``)::

        r = x + dropout(A(LN(x)) attn_ow^T + attn_ob)
        y = r + dropout(gelu(LN(r) inter_w^T + inter_b) output_w^T + output_b)

    Norms after::

        f = LN(x + dropout(A(x) attn_ow^T + attn_ob))
        y = LN(f + dropout(gelu(f inter_w^T + inter_b) output_w^T + output_b))

    Under `torch.autocast` all tensors but float64 ones are cast to its dtype on entering, as torch's linear casts
    its own; the result has that dtype.

    Args:
        layer: what it is.
        input: ``[B, S, H]``: float32, bfloat16, float16, float64.
        mask: added to the scores; broadcasts to ``[B, heads, S, S]``, the dtype of input.
        weights: of the dtype of input.

    Raises:
        InvalidTensorError: shapes or dtypes do not fit, or a norm that is to be inverted has a weight of 0.
    """
    device_type = input.device.type
    if not _is_autocast_enabled(device_type):
        return _forward(layer, input, mask, weights)
    dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        return _forward(layer, _cast(input, dtype), _cast_mask(mask, dtype), _cast_weights(weights, dtype))


def _forward(layer: LayerConfig, input: Tensor, mask: Tensor | None, weights: Weights) -> tuple[Tensor, SavedTensors]:
    _check(layer, input, mask, weights)
    nothing = input.new_empty(0)
    attn_p, p = layer.attn_dropout, layer.hidden_dropout
    # The sum of two seeds may wrap around, which does no harm.
    seeds = new_seed(3, input.device) + layer.seed if attn_p or p else nothing.new_zeros(3, dtype=torch.int64)
    normed, mean, rstd = input, nothing, nothing
    if layer.pre_layer_norm:
        normed, _, mean, rstd = _norm(input, None, None, weights.norm_w, weights.norm_b, None, 0.0, layer.eps)
    qkv = _as_in(input, product(_rows(normed), weights.attn_qkvw.t(), weights.attn_qkvb))
    context, probs, dropped, attn_seed, attn_offset = _attend(layer, qkv, mask, seeds[0], attn_p)
    attention = product(_rows(context), weights.attn_ow.t()).view_as(input)
    attn_normed, attn_sum, attn_mean, attn_rstd = _norm(
        attention, weights.attn_ob, input, weights.attn_nw, weights.attn_nb, seeds[1], p, layer.eps
    )
    inter = _as_in(input, product(_rows(attn_normed), weights.inter_w.t()))
    gelu = _library.call("fused_bias_gelu", inter, weights.inter_b, layer.tanh)
    hidden = product(_rows(gelu), weights.output_w.t()).view_as(input)
    if layer.pre_layer_norm:
        output = _library.call("dropout_add", hidden, weights.output_b, attn_sum, seeds[2], p)
    else:
        output, normed, mean, rstd = _norm(
            hidden, weights.output_b, attn_normed, weights.norm_w, weights.norm_b, seeds[2], p, layer.eps
        )
    if layer.gelu_checkpoint:
        gelu = inter
    if layer.attn_dropout_checkpoint:
        dropped = probs
    if layer.normalize_invertible:
        attn_sum = nothing
        normed = normed if layer.pre_layer_norm else nothing
    return output, SavedTensors(
        qkv,
        probs,
        dropped,
        context,
        attn_sum,
        attn_normed,
        inter,
        gelu,
        normed,
        attn_seed,
        attn_offset,
        seeds,
        attn_mean,
        attn_rstd,
        mean,
        rstd,
    )


def backward(
    layer: LayerConfig,
    grad_output: Tensor,
    output: Tensor | None,
    kept: SavedTensors,
    input: Tensor | None,
    mask: Tensor | None,
    weights: Weights,
) -> tuple[Tensor, Weights]:
    """The gradients of input and of all weights; arguments as `forward` had and gave them.

    Args:
        grad_output: ``[B, S, H]``.
        output: the layer's result; wanted only if norms stand after and are to be inverted.
        input: wanted unless norms stand before and are to be inverted.

    Returns:
        Gradients of the dtype in which `forward` computed. Autograd casts them to that of their leaves.
    """
    device_type, dtype = grad_output.device.type, kept.qkv.dtype
    # Where `forward` ran under autocast, these are as they were before.
    input, mask = None if input is None else input.to(dtype), _cast_mask(mask, dtype)
    weights = _cast_weights(weights, dtype)
    with torch.autocast(device_type, enabled=False) if _is_autocast_enabled(device_type) else nullcontext():
        return _backward(layer, grad_output, output, kept, input, mask, weights)


def _backward(
    layer: LayerConfig,
    grad_output: Tensor,
    output: Tensor | None,
    kept: SavedTensors,
    input: Tensor | None,
    mask: Tensor | None,
    weights: Weights,
) -> tuple[Tensor, Weights]:
    attn_p, p, invert = layer.attn_dropout, layer.hidden_dropout, layer.normalize_invertible
    grad_output = grad_output.contiguous()
    norm_w: Tensor | None = None
    norm_b: Tensor | None = None
    if layer.pre_layer_norm:
        grad_hidden, output_b = _library.call("dropout_add_backward", grad_output, kept.seeds[2], p, True)
        residual = grad_output
    else:
        residual, grad_hidden, norm_w, norm_b, output_b = _norm_backward(
            *(grad_output, None, output if invert else kept.normed, None if invert else kept.mean, kept.rstd),
            *(weights.norm_w, weights.norm_b, kept.seeds[2], p, True),
        )
    # Feed-forward.
    gelu = kept.gelu
    if layer.gelu_checkpoint:
        gelu = _library.call("fused_bias_gelu", kept.inter, weights.inter_b, layer.tanh)
    grad_rows = _rows(grad_hidden)
    output_w = product(grad_rows.t(), _rows(gelu))
    del gelu
    grad_inter, inter_b = _library.call(
        "fused_bias_gelu_backward",
        *(product(grad_rows, weights.output_w).view_as(kept.inter), kept.inter, weights.inter_b, layer.tanh),
    )
    inter_w = product(_rows(grad_inter).t(), _rows(kept.attn_normed))
    if layer.pre_layer_norm:
        grad_normed, grad_sum = product(_rows(grad_inter), weights.inter_w).view_as(grad_output), residual
    else:
        grad_normed, grad_sum = _add_product(residual, grad_inter, weights.inter_w), None
    residual, grad_attention, attn_nw, attn_nb, attn_ob = _norm_backward(
        *(grad_normed, grad_sum, kept.attn_normed if invert else kept.attn_sum, None if invert else kept.attn_mean),
        *(kept.attn_rstd, weights.attn_nw, weights.attn_nb, kept.seeds[1], p, True),
    )
    # Attention.
    attn_ow = product(_rows(grad_attention).t(), _rows(kept.context))
    grad_context = product(_rows(grad_attention), weights.attn_ow).view_as(grad_output)
    grad_qkv = _attend_backward(layer, grad_context, kept, mask, attn_p)
    normed = kept.normed if layer.pre_layer_norm else input
    assert normed is not None
    attn_qkvw, attn_qkvb = product(_rows(grad_qkv).t(), _rows(normed)), _rows(grad_qkv).sum(dim=0)
    if layer.pre_layer_norm:
        grad_input, _, norm_w, norm_b, _ = _norm_backward(
            *(product(_rows(grad_qkv), weights.attn_qkvw).view_as(grad_output), residual, normed if invert else input),
            *(None if invert else kept.mean, kept.rstd, weights.norm_w, weights.norm_b, None, 0.0, False),
        )
    else:
        grad_input = _add_product(residual, grad_qkv, weights.attn_qkvw)
    assert norm_w is not None and norm_b is not None
    return grad_input, Weights(
        *(attn_qkvw, attn_qkvb, attn_ow, attn_ob, attn_nw, attn_nb),
        *(inter_w, inter_b, output_w, output_b, norm_w, norm_b),
    )


# ---------------------------------------------------------------------------------- autocast


def _is_autocast_enabled(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast casts: float64 stays."""
    return x if x.dtype == torch.float64 else x.to(dtype)


def _cast_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask in another dtype. A large number stays finite: a row of infinities would give NaN."""
    if mask is None or mask.dtype in (dtype, torch.float64):
        return mask
    limits = torch.finfo(dtype)
    return torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max)).to(dtype)


def _cast_weights(weights: Weights, dtype: torch.dtype) -> Weights:
    return Weights(*(_cast(weight, dtype) for weight in weights))


# ---------------------------------------------------------------------------------- attention


def _attend(
    layer: LayerConfig, qkv: Tensor, mask: Tensor | None, seed: Tensor, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The attention's result, ``[B, S, H]``, and what is kept of it."""
    q, k, v = _heads(layer, qkv)
    if _torch_attention.is_best(q, mask, p):
        context, kept = _torch_attention.forward(q, k, v, _full(mask), p)
        return _merged(context), kept.sums, kept.sums, kept.seed, kept.offset
    scores = _product(_matrices(q), _matrices(k).mT, q)
    dropped, probs = _library.call("masked_softmax_dropout", scores, mask, 1 / math.sqrt(q.shape[-1]), seed, p)
    context = _product(_matrices(dropped), _matrices(v), q)
    nothing = q.new_empty(0)
    return _merged(context), probs if p else dropped, dropped, nothing, nothing


def _attend_backward(
    layer: LayerConfig, grad_context: Tensor, kept: SavedTensors, mask: Tensor | None, p: float
) -> Tensor:
    """The gradient of queries, keys and values, ``[B, S, 3 H]``."""
    q, k, v = _heads(layer, kept.qkv)
    grad = _by_heads(layer, grad_context)
    if kept.probs.dim() == 3:
        context = _by_heads(layer, kept.context)
        of_torch = _torch_attention.Saved(kept.probs, kept.attn_seed, kept.attn_offset)
        grads = _torch_attention.backward(grad, q, k, v, _full(mask), context, of_torch, p)
    else:
        dropped = kept.dropped
        if layer.attn_dropout_checkpoint and p:
            dropped = _library.call("dropout_add", kept.probs, None, None, kept.seeds[0], p)
        grad_rows, queries, keys, values = (_matrices(each) for each in (grad, q, k, v))
        grad_v = _product(_matrices(dropped).mT, grad_rows, q)
        del dropped
        grad_scores = _library.call(
            "masked_softmax_dropout_backward",
            *(_product(grad_rows, values.mT, q), kept.probs, 1 / math.sqrt(q.shape[-1]), kept.seeds[0], p),
        )
        grad_scores = _matrices(grad_scores)
        grads = (_product(grad_scores, keys, q), _product(grad_scores.mT, queries, q), grad_v)
    grad_qkv = torch.empty_like(kept.qkv)
    for part, grad in zip(_heads(layer, grad_qkv), grads, strict=True):
        part.copy_(grad)
    return grad_qkv


def _heads(layer: LayerConfig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, ``[B, heads, S, head_dim]``, views."""
    q, k, v = (_by_heads(layer, each) for each in qkv.chunk(3, dim=-1))
    return q, k, v


def _by_heads(layer: LayerConfig, x: Tensor) -> Tensor:
    """``[B, S, H]`` as ``[B, heads, S, head_dim]``, a view."""
    return x.view(*x.shape[:2], layer.heads, x.shape[2] // layer.heads).transpose(1, 2)


def _matrices(x: Tensor) -> Tensor:
    """``[B, heads, ...]`` as ``[B * heads, ...]``, contiguous, so that its transpose need not be copied."""
    return x.flatten(0, 1)


def _product(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """The products of matrices, divided into heads as `like` is."""
    return torch.bmm(a, b).view(*like.shape[:2], a.shape[1], b.shape[2])


def _merged(context: Tensor) -> Tensor:
    return context.transpose(1, 2).flatten(2)


def _full(mask: Tensor | None) -> Tensor | None:
    """A mask with four dimensions."""
    return None if mask is None else mask[(None,) * (4 - mask.dim())]


# ---------------------------------------------------------------------------------- parts


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _as_in(input: Tensor, rows: Tensor) -> Tensor:
    """Rows for each token of input, ``[B, S, ...]``."""
    return rows.view(*input.shape[:2], rows.shape[1])


def _norm(*arguments: Tensor | float | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _library.call("dropout_add_layer_norm", *arguments)
    return result


def _norm_backward(*arguments: Tensor | float | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the op, but the gradient of its input always has elements."""
    total, dropped, *grads = _library.call("dropout_add_layer_norm_backward", *arguments)
    *_, p, _ = arguments
    return total, dropped if p else total, *grads


def _add_product(residual: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    return product(_rows(grad), weight, _rows(residual)).view_as(residual)


def _check(layer: LayerConfig, input: Tensor, mask: Tensor | None, weights: Weights) -> None:
    if input.dim() != 3 or input.shape[-1] % layer.heads:
        raise InvalidTensorError(
            f"input has shape {list(input.shape)}",
            op=OP,
            why=f"expected [batch, sequence, hidden], a hidden size that {layer.heads} heads divide",
        )
    hidden, inter = input.shape[-1], weights.inter_w.shape[0]
    shapes: tuple[tuple[int, ...], ...] = (
        *((3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,), (hidden,), (hidden,)),
        *((inter, hidden), (inter,), (hidden, inter), (hidden,), (hidden,), (hidden,)),
    )
    for name, weight, shape in zip(Weights._fields, weights, shapes, strict=True):
        if weight.shape != shape or weight.dtype != input.dtype or weight.device != input.device:
            raise InvalidTensorError(
                f"{name} is {weight.dtype} {list(weight.shape)} on {weight.device}",
                op=OP,
                why=f"expected {input.dtype} {list(shape)} on {input.device}, as input is",
            )
    batch, sequence = input.shape[:2]
    full = (batch, layer.heads, sequence, sequence)
    if mask is not None:
        fits = mask.dim() <= 4 and all(
            size in (1, wanted) for size, wanted in zip(reversed(mask.shape), reversed(full), strict=False)
        )
        if not fits or mask.dtype != input.dtype or mask.device != input.device:
            raise InvalidTensorError(
                f"the mask is {mask.dtype} {list(mask.shape)} on {mask.device}",
                op=OP,
                why=f"expected {input.dtype} on {input.device}, and a shape that broadcasts to {list(full)}",
            )
    inverted = (weights.attn_nw, weights.norm_w) if layer.normalize_invertible else ()
    if torch.compiler.is_compiling():  # where no branch depends on numbers
        for weight in inverted:
            torch._assert_async((weight != 0).all(), "a norm with a weight of 0 cannot be inverted")  # type: ignore[no-untyped-call, unused-ignore]  # torch gives it no type
    elif any(bool((weight == 0).any()) for weight in inverted):
        raise InvalidTensorError(
            "a norm with a weight of 0 cannot be inverted", op=OP, hint="train without normalize_invertible"
        )


__all__ = ["LayerConfig", "SavedTensors", "Weights", "backward", "forward"]
