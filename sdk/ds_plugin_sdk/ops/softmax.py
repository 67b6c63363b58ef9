"""Softmax of attention scores, with what comes before it: ``ds_plugin::softmax`` and, in place, ``softmax_``."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library, _tensors
from ds_plugin_sdk.ops._multi_tensor import mark_modified, text


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
        scores: ``[batch, heads, queries, keys]``: float32, bfloat16, float16 (float64 by the reference alone).
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
    added = _added("softmax", scores, mask, alibi)
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
    """`softmax` in place; returns `scores`. Autograd does not record it.

    Raises:
        InvalidTensorError: as `softmax`, or elements of scores share memory; nothing was modified.
    """
    _library.call("softmax_", scores, *_added("softmax_", scores, mask, alibi), scale, causal, window)
    mark_modified([scores])
    return scores


def _added(op: str, scores: Tensor, mask: Tensor | None, alibi: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Mask and alibi as the op takes them: of four dimensions, of one floating-point dtype."""
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=_tensors.working(scores), device=mask.device).masked_fill_(
            ~mask, -torch.inf
        )
    if mask is not None and alibi is not None and mask.dtype != alibi.dtype:
        for name, tensor in (("mask", mask), ("alibi", alibi)):
            _check_dtype(op, name, tensor, scores)
        mask, alibi = mask.to(_tensors.working(scores)), alibi.to(_tensors.working(scores))
    return mask, alibi


@torch.no_grad()
def softmax_reference(
    scores: Tensor, mask: Tensor | None, alibi: Tensor | None, scale: float, causal: bool, window: int
) -> Tensor:
    """``ds_plugin::softmax`` in plain torch, on any device."""
    _check("softmax", scores, mask, alibi, window)
    return _softmax(scores, mask, alibi, scale, causal, window).to(scores.dtype)


@torch.no_grad()
def softmax_in_place_reference(
    scores: Tensor, mask: Tensor | None, alibi: Tensor | None, scale: float, causal: bool, window: int
) -> None:
    """``ds_plugin::softmax_`` in plain torch, on any device."""
    _check("softmax_", scores, mask, alibi, window)
    _tensors.check_written("softmax_", "scores", scores)
    scores.copy_(_softmax(scores, mask, alibi, scale, causal, window))


def _softmax(
    scores: Tensor, mask: Tensor | None, alibi: Tensor | None, scale: float, causal: bool, window: int
) -> Tensor:
    dtype = _tensors.working(scores)
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


def _fake(scores: Tensor, mask: Tensor | None, alibi: Tensor | None, scale: float, causal: bool, window: int) -> Tensor:
    _check("softmax", scores, mask, alibi, window)
    return scores.new_empty(scores.shape)


def _fake_in_place(
    scores: Tensor, mask: Tensor | None, alibi: Tensor | None, scale: float, causal: bool, window: int
) -> None:
    _check("softmax_", scores, mask, alibi, window)


def _check(op: str, scores: Tensor, mask: Tensor | None, alibi: Tensor | None, window: int) -> None:
    _tensors.check_first(op, "scores", scores)
    if scores.dim() != 4:
        raise _library.invalid(op, f"scores has shape {list(scores.shape)}; expected [batch, heads, queries, keys]")
    if window < 0:
        raise _library.invalid(op, f"window is {window}; expected a number of positions, or 0")
    for name, tensor in (("mask", mask), ("alibi", alibi)):
        if tensor is not None:
            _check_added(op, name, tensor, scores)
    if mask is not None and alibi is not None and mask.dtype != alibi.dtype:
        raise _library.invalid(op, f"alibi is {text(alibi.dtype)}; expected {text(mask.dtype)}, as mask")


def _check_added(op: str, name: str, tensor: Tensor, scores: Tensor) -> None:
    if tensor.device != scores.device:
        raise _library.invalid(op, f"{name} is on {tensor.device}; expected {scores.device}, where scores are")
    _check_dtype(op, name, tensor, scores)
    fits = tensor.dim() == 4 and tensor.shape[3] == scores.shape[3]
    if not fits or any(size not in (1, whole) for size, whole in zip(tensor.shape[:3], scores.shape[:3], strict=True)):
        raise _library.invalid(
            op,
            f"{name} has shape {list(tensor.shape)}; expected {list(scores.shape)}, or 1 instead of any but the last",
        )


def _check_dtype(op: str, name: str, tensor: Tensor, scores: Tensor) -> None:
    if tensor.dtype not in (scores.dtype, torch.float32):
        raise _library.invalid(op, f"{name} is {text(tensor.dtype)}; expected {text(scores.dtype)} or float32")


_ARGUMENTS = "Tensor? mask, Tensor? alibi, float scale, bool causal, int window"
_library.define(f"softmax(Tensor scores, {_ARGUMENTS}) -> Tensor", reference=softmax_reference, fake=_fake)
_library.define(
    f"softmax_(Tensor(a!) scores, {_ARGUMENTS}) -> ()", reference=softmax_in_place_reference, fake=_fake_in_place
)

__all__ = ["softmax", "softmax_"]
