"""Additions to a residual, and the small matrix ops of DeepSpeed's inference module.

``ds_plugin::residual_add_bias_``, ``moe_res_matmul_``, ``einsum_sec_sm_ecm`` and ``pad_transform``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_first, check_other, check_written
from ds_plugin_sdk.ops._references import working

# What DeepSpeed's flash attention takes: sizes of a head, each for heads that are smaller; and so many keys.
_HEAD_SIZES = (32, 64, 128)
_KEYS = 128


def residual_add_bias_(
    residual: Tensor,
    hidden: Tensor,
    attention: Tensor | None = None,
    attention_bias: Tensor | None = None,
    final_bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    scale_attention: bool = False,
) -> Tensor:
    """Add to a residual, in place; returns `residual`. A term that is None is zero::

        residual <- hidden + scale * (residual + attention_bias + final_bias) + attention
        residual <- hidden + scale * (residual + attention_bias + final_bias + attention)      if scale_attention

    With tensor parallelism over n ranks `scale` is 1 / n, so that a sum over the ranks has the terms once. Arithmetic
    is in float32 (float64 for float64 tensors), rounded once. A backward pass through it raises `SdkError`.

    Args:
        residual: ``[..., columns]``: float32, bfloat16, float16 (float64: reference only).
        hidden, attention: shape and dtype of residual.
        attention_bias, final_bias: ``[columns]``, the dtype of residual.

    Raises:
        InvalidTensorError: shapes, dtypes, devices or memory do not fit; nothing was modified.
    """
    _library.call("residual_add_bias_", residual, hidden, attention, attention_bias, final_bias, scale, scale_attention)
    _library.mark_modified([residual])
    return residual


def moe_res_matmul_(output: Tensor, residual: Tensor, coefficients: Tensor) -> Tensor:
    """Mix a mixture of experts with its residual expert, in place; returns `output`::

        output <- output * coefficients[columns:] + residual * coefficients[:columns]

    the same for every token (Rajbhandari et al. 2022: residual MoE). Arithmetic as in `residual_add_bias_`.

    Args:
        output: ``[..., columns]``: float32, bfloat16, float16 (float64: reference only).
        residual: shape and dtype of output.
        coefficients: ``[2 * columns]``, the dtype of output.

    Raises:
        InvalidTensorError: shapes, dtypes, devices or memory do not fit; nothing was modified.
    """
    _library.call("moe_res_matmul_", output, residual, coefficients)
    _library.mark_modified([output])
    return output


def einsum_sec_sm_ecm(dispatch: Tensor, tokens: Tensor) -> Tensor:
    """Hand tokens to experts: ``result[e, c, m] = sum over s of dispatch[s, e, c] * tokens[s, m]``.

    A matrix product, which the device's own library computes.

    Args:
        dispatch: ``[tokens, experts, capacity]``: float32, bfloat16, float16, float64.
        tokens: ``[tokens, width]``, the dtype of dispatch.

    Returns:
        ``[experts, capacity, width]``, the dtype of dispatch.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit.
    """
    result: Tensor = _library.call("einsum_sec_sm_ecm", dispatch, tokens)
    return result


def pad_transform(query: Tensor, key: Tensor, value: Tensor, heads: int, pad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Split heads and, if told so, pad with zeros, as DeepSpeed's flash attention wants its arguments.

    Args:
        query, key, value: ``[batch, tokens, heads * head_dim]``; key and value may have another number of tokens. Any
            dtype of this module.
        heads: number of heads.
        pad: pad head_dim to 32, 64 or 128 (see `padded_head_dim`), and keys and values to 128 tokens.

    Returns:
        Three new tensors ``[batch, heads, tokens, head_dim]``.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or there is more than padding can reach.
    """
    result: tuple[Tensor, Tensor, Tensor] = _library.call("pad_transform", query, key, value, heads, pad)
    return result


def padded_head_dim(head_dim: int) -> int:
    """The size to which DeepSpeed pads a head: the next larger of 32, 64 and 128, though 32 would fit 32; 128 for 128
    and more.
    """
    return next((size for size in _HEAD_SIZES if head_dim < size), _HEAD_SIZES[-1])


def _check_residual(
    residual: Tensor,
    hidden: Tensor,
    attention: Tensor | None,
    attention_bias: Tensor | None,
    final_bias: Tensor | None,
) -> None:
    check_first("residual", residual)
    for name, tensor in (("hidden", hidden), ("attention", attention)):
        check_other(name, tensor, residual, residual.shape)
    for name, tensor in (("attention_bias", attention_bias), ("final_bias", final_bias)):
        check_other(name, tensor, residual, residual.shape[-1:])


@_library.op(
    "residual_add_bias_(Tensor(a!) residual, Tensor hidden, Tensor? attention, Tensor? attention_bias, "
    "Tensor? final_bias, float scale, bool scale_attention) -> ()",
    check=_check_residual,
)
def residual_add_bias_reference(
    residual: Tensor,
    hidden: Tensor,
    attention: Tensor | None,
    attention_bias: Tensor | None,
    final_bias: Tensor | None,
    scale: float,
    scale_attention: bool,
) -> None:
    """``ds_plugin::residual_add_bias_`` in plain torch, on any device."""
    check_written("residual", residual)
    dtype = working(residual)
    scaled, total = residual.to(dtype), hidden.to(dtype)
    for term in (attention_bias, final_bias, attention if scale_attention else None):
        if term is not None:
            scaled = scaled + term.to(dtype)
    if attention is not None and not scale_attention:
        total = total + attention.to(dtype)
    residual.copy_(total + scale * scaled)


def _check_moe(output: Tensor, residual: Tensor, coefficients: Tensor) -> None:
    check_first("output", output)
    check_other("residual", residual, output, output.shape)
    check_other("coefficients", coefficients, output, [2 * output.shape[-1]])


@_library.op(
    "moe_res_matmul_(Tensor(a!) output, Tensor residual, Tensor coefficients) -> ()",
    check=_check_moe,
)
def moe_res_matmul_reference(output: Tensor, residual: Tensor, coefficients: Tensor) -> None:
    """``ds_plugin::moe_res_matmul_`` in plain torch, on any device."""
    check_written("output", output)
    dtype = working(output)
    of_residual, of_output = coefficients.to(dtype).chunk(2)
    output.copy_(output.to(dtype) * of_output + residual.to(dtype) * of_residual)


def _check_einsum(dispatch: Tensor, tokens: Tensor) -> None:
    check_first("dispatch", dispatch)
    if dispatch.dim() != 3:
        raise CheckError(f"dispatch has shape {list(dispatch.shape)}; expected [tokens, experts, capacity]")
    width = tokens.shape[1] if tokens.dim() == 2 else 0
    check_other("tokens", tokens, dispatch, [dispatch.shape[0], width])


@_library.op(
    "einsum_sec_sm_ecm(Tensor dispatch, Tensor tokens) -> Tensor",
    check=_check_einsum,
    outputs=lambda dispatch, tokens: dispatch.new_empty((*dispatch.shape[1:], tokens.shape[1])),
)
def einsum_sec_sm_ecm_reference(dispatch: Tensor, tokens: Tensor) -> Tensor:
    """``ds_plugin::einsum_sec_sm_ecm``: one matrix product, on any device."""
    return (dispatch.flatten(1).t() @ tokens).reshape(*dispatch.shape[1:], tokens.shape[1])


def _check_pad(query: Tensor, key: Tensor, value: Tensor, heads: int, pad: bool) -> None:
    check_first("query", query)
    if query.dim() != 3 or heads <= 0 or query.shape[2] % heads:
        raise CheckError(
            f"query has shape {list(query.shape)}, for {heads} heads; expected [batch, tokens, heads * head_dim]"
        )
    batch, _, width = query.shape
    keys, head_dim = key.shape[1] if key.dim() == 3 else 0, width // heads
    for name, tensor in (("key", key), ("value", value)):
        check_other(name, tensor, query, [batch, keys, width])
    if pad and (head_dim > _HEAD_SIZES[-1] or keys > _KEYS):
        raise CheckError(
            f"there are {keys} keys of {head_dim} elements; expected at most {_KEYS} of {_HEAD_SIZES[-1]} to pad"
        )


def _padded_shapes(query: Tensor, key: Tensor, heads: int, pad: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of the results."""
    batch, queries, width = query.shape
    head_dim = padded_head_dim(width // heads) if pad else width // heads
    keys = _KEYS if pad else key.shape[1]
    return (batch, heads, queries, head_dim), *[(batch, heads, keys, head_dim)] * 2


def _new_padded(query: Tensor, key: Tensor, heads: int, pad: bool) -> tuple[Tensor, ...]:
    return tuple(query.new_empty(shape) for shape in _padded_shapes(query, key, heads, pad))


@_library.op(
    "pad_transform(Tensor query, Tensor key, Tensor value, int heads, bool pad) -> (Tensor, Tensor, Tensor)",
    check=_check_pad,
    outputs=_new_padded,
)
def pad_transform_reference(query: Tensor, key: Tensor, value: Tensor, heads: int, pad: bool) -> tuple[Tensor, ...]:
    """``ds_plugin::pad_transform``: copies only, on any device."""
    shapes = _padded_shapes(query, key, heads, pad)
    return tuple(_padded(tensor, heads, shape) for tensor, shape in zip((query, key, value), shapes, strict=True))


def _padded(tensor: Tensor, heads: int, shape: tuple[int, ...]) -> Tensor:
    batch, tokens, width = tensor.shape
    split = tensor.reshape(batch, tokens, heads, width // heads).transpose(1, 2)
    padding = (0, shape[3] - split.shape[3], 0, shape[2] - split.shape[2])
    return functional.pad(split, padding).clone(memory_format=torch.contiguous_format)


__all__ = ["einsum_sec_sm_ecm", "moe_res_matmul_", "pad_transform", "padded_head_dim", "residual_add_bias_"]
