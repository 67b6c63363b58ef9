"""Softmax of attention scores, with what comes before it: ``ds_plugin::softmax`` and, in place, ``softmax_``.

A backward pass through them raises `SdkError`: the functions of `ds_plugin_sdk.nn` have derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_first, check_written, text
from ds_plugin_sdk.ops._references import working


def softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    alibi: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    window: int = 0,
) -> Tensor:
    """``softmax(scale * scores + mask + alibi)`` over the last dimension.

    Of n queries and k keys, query i stands at position ``k - n + i``, key j at position j. Arithmetic is in float32
    (float64 for float64 tensors), rounded once. A row in which nothing may take part gives zeros.

    Args:
        scores: ``[batch, heads, queries, keys]``: float32, bfloat16, float16 (float64: reference only).
        mask: added to the scores; bool: False takes no part. ``[batch, keys]``, or of four dimensions, any but the last
            may be 1. Floating point: the dtype of scores, or float32.
        alibi: added to the scores, as a floating-point mask (Press et al. 2022: slope of the head times position).
        scale: of the scores.
        causal: keys after the query's position take no part.
        window: only the last `window` positions take part, the query's own included; 0 for all.

    Returns:
        A new contiguous tensor of scores' shape and dtype.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit.
    """
    added = _added(scores, mask, alibi)
    result: Tensor = _library.call("softmax", scores, *added, scale, causal, window)
    return result


def softmax_(
    scores: Tensor,
    mask: Tensor | None = None,
    alibi: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    window: int = 0,
) -> Tensor:
    """`softmax` in place; returns `scores`. A backward pass through it raises `SdkError`.

    Raises:
        InvalidTensorError: as `softmax`, or elements of scores share memory; nothing was modified.
    """
    _library.call("softmax_", scores, *_added(scores, mask, alibi), scale, causal, window)
    _library.mark_modified([scores])
    return scores


def _added(scores: Tensor, mask: Tensor | None, alibi: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Mask and alibi as the op takes them: of four dimensions, of one floating-point dtype."""
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=working(scores), device=mask.device).masked_fill_(~mask, -torch.inf)
    if mask is not None and alibi is not None and {mask.dtype, alibi.dtype} == {scores.dtype, torch.float32}:
        mask, alibi = mask.to(working(scores)), alibi.to(working(scores))
    return mask, alibi


def _check(scores: Tensor, mask: Tensor | None, alibi: Tensor | None, window: int) -> None:
    check_first("scores", scores)
    if scores.dim() != 4:
        raise CheckError(f"scores has shape {list(scores.shape)}; expected [batch, heads, queries, keys]")
    if window < 0:
        raise CheckError(f"window is {window}; expected a number of positions, or 0")
    for name, tensor in (("mask", mask), ("alibi", alibi)):
        if tensor is not None:
            _check_added(name, tensor, scores)
    if mask is not None and alibi is not None and mask.dtype != alibi.dtype:
        raise CheckError(f"alibi is {text(alibi.dtype)}; expected {text(mask.dtype)}, as mask")


def _check_added(name: str, tensor: Tensor, scores: Tensor) -> None:
    if tensor.device != scores.device:
        raise CheckError(f"{name} is on {tensor.device}; expected {scores.device}, where scores are")
    if tensor.dtype not in (scores.dtype, torch.float32):
        raise CheckError(f"{name} is {text(tensor.dtype)}; expected {text(scores.dtype)} or float32")
    fits = tensor.dim() == 4 and tensor.shape[3] == scores.shape[3]
    if not fits or any(size not in (1, whole) for size, whole in zip(tensor.shape[:3], scores.shape[:3], strict=True)):
        raise CheckError(
            f"{name} has shape {list(tensor.shape)}; expected {list(scores.shape)}, or 1 instead of any but the last"
        )


@_library.op(
    "softmax(Tensor scores, Tensor? mask, Tensor? alibi, float scale, bool causal, int window) -> Tensor",
    check=_check,
    outputs=lambda scores: scores.new_empty(scores.shape),
)
def softmax_reference(
    scores: Tensor, mask: Tensor | None, alibi: Tensor | None, scale: float, causal: bool, window: int
) -> Tensor:
    """``ds_plugin::softmax`` in plain torch, on any device."""
    return _softmax(scores, mask, alibi, scale, causal, window).to(scores.dtype)


@_library.op(
    "softmax_(Tensor(a!) scores, Tensor? mask, Tensor? alibi, float scale, bool causal, int window) -> ()",
    check=_check,
)
def softmax_in_place_reference(
    scores: Tensor, mask: Tensor | None, alibi: Tensor | None, scale: float, causal: bool, window: int
) -> None:
    """``ds_plugin::softmax_`` in plain torch, on any device."""
    check_written("scores", scores)
    scores.copy_(_softmax(scores, mask, alibi, scale, causal, window))


def _softmax(
    scores: Tensor, mask: Tensor | None, alibi: Tensor | None, scale: float, causal: bool, window: int
) -> Tensor:
    dtype = working(scores)
    x = scores.to(dtype, memory_format=torch.contiguous_format) * scale
    for added in (mask, alibi):
        if added is not None:
            x = x + added.to(dtype)
    queries, keys = scores.shape[2:]
    key = torch.arange(keys, device=scores.device)
    position = torch.arange(keys - queries, keys, device=scores.device).unsqueeze(1)
    if causal:
        x = x.masked_fill(key > position, -torch.inf)
    if window:
        x = x.masked_fill(key <= position - window, -torch.inf)
    if keys == 0:
        return x
    top = x.amax(dim=-1, keepdim=True)
    e = torch.exp(x - torch.where(top == -torch.inf, 0.0, top))
    total = e.sum(dim=-1, keepdim=True)
    return e / torch.where(total == 0, 1.0, total)


__all__ = ["softmax", "softmax_"]
