"""``ds_plugin::masked_softmax_dropout`` and its derivative."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_other
from ds_plugin_sdk.ops._derived_once import derived_once
from ds_plugin_sdk.ops._library import invalid
from ds_plugin_sdk.ops._references import working
from ds_plugin_sdk.ops.transformer._parts import check_dropout, contiguous, drop


def masked_softmax_dropout(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """``dropout(softmax(scale * scores + mask))`` over the last dimension. A row that is all -inf gives zeros.

    Args:
        scores: ``[..., columns]``, at most 5 dimensions: float32, bfloat16, float16 (float64: reference only).
        mask: what is added, of the dtype of scores; broadcasts to the shape of scores. It gets no gradient.
        scale: of the scores.
        p, seed: as in `dropout_add`.

    Returns:
        A new contiguous tensor of scores' shape and dtype.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, `p` is out of range, or `mask` wants a gradient.
    """
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise invalid("masked_softmax_dropout", "mask requires a gradient; expected one that does not: it gets none")
    output: Tensor = _library.call("masked_softmax_dropout", scores, mask, scale, seed, p)[0]
    return output


def _check(scores: Tensor, mask: Tensor | None, seed: Tensor | None, p: float) -> None:
    check_dropout(scores, seed, p, "scores")
    if scores.dim() > 5:
        raise CheckError(f"scores has {scores.dim()} dimensions; expected at most 5")
    if mask is None:
        return
    fits = mask.dim() <= scores.dim() and all(
        size in (1, wanted) for size, wanted in zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    )
    if not fits or mask.dtype != scores.dtype or mask.device != scores.device:
        raise CheckError(
            f"mask is {mask.dtype} {list(mask.shape)} on {mask.device}; "
            f"expected {scores.dtype} on {scores.device} that broadcasts to {list(scores.shape)}",
        )


def _new_outputs(scores: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape), scores.new_empty(scores.shape if p else 0)


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, ctx.scale, seed, ctx.p = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1] if ctx.p else output[0], seed)


# What is kept with dropout has no derivative.
@functools.partial(derived_once, "masked_softmax_dropout", nonlinear=True)
def _derive_softmax(ctx: Any, grad_output: Tensor, _: None) -> tuple[Tensor | None, ...]:
    probs, seed = ctx.saved_tensors
    grad = _library.call("masked_softmax_dropout_backward", grad_output, probs, ctx.scale, seed, ctx.p)
    return grad, None, None, None, None


@_library.op(
    "masked_softmax_dropout(Tensor scores, Tensor? mask, float scale, Tensor? seed, float p) -> (Tensor, Tensor)",
    check=_check,
    outputs=_new_outputs,
    autograd=_library.Autograd(_derive_softmax, _save_softmax, raises=True),
)
def masked_softmax_dropout_reference(
    scores: Tensor, mask: Tensor | None, scale: float, seed: Tensor | None, p: float
) -> tuple[Tensor, Tensor]:
    """``ds_plugin::masked_softmax_dropout`` in plain torch, on any device; arguments as in `masked_softmax_dropout`.

    Returns:
        The result, and what it was before dropout, which has no elements if `p` is 0, since it is the result.
    """
    x = scores.to(working(scores)) * scale
    if mask is not None:
        x = x + mask.to(x.dtype)
    top = x.amax(dim=-1, keepdim=True) if x.numel() else x
    weights = torch.exp(x - torch.where(top == -torch.inf, 0.0, top))
    sums = weights.sum(dim=-1, keepdim=True)
    probs = weights / torch.where(sums == 0, 1.0, sums)
    if p == 0:
        return contiguous(probs, scores), scores.new_empty(0)
    return contiguous(drop(probs, seed, p), scores), contiguous(probs, scores)


def _check_backward(grad_output: Tensor, probs: Tensor, seed: Tensor | None, p: float) -> None:
    check_dropout(grad_output, seed, p)
    check_other("probs", probs, grad_output, grad_output.shape)


@_library.op(
    "masked_softmax_dropout_backward(Tensor grad_output, Tensor probs, float scale, Tensor? seed, float p) -> Tensor",
    check=_check_backward,
    outputs=lambda grad_output: grad_output.new_empty(grad_output.shape),
)
def masked_softmax_dropout_backward_reference(
    grad_output: Tensor, probs: Tensor, scale: float, seed: Tensor | None, p: float
) -> Tensor:
    """The gradient of scores, from `probs`, the softmax before dropout."""
    weights = probs.to(working(probs))
    grad = drop(grad_output.to(weights.dtype), seed, p)
    return contiguous(scale * weights * (grad - (grad * weights).sum(dim=-1, keepdim=True)), grad_output)
