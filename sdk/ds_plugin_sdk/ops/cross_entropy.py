"""Cross entropy of rows of logits, with its gradient written over them: ``ds_plugin::cross_entropy_``.

It has no derivative: it is one. `ds_plugin_sdk.ops.linear_cross_entropy` is made of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_device, check_dtype, check_first, check_written
from ds_plugin_sdk.ops._references import working


def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    gradient: bool = True,
) -> Tensor:
    """The loss of each row of logits; each row becomes the gradient of its loss. With s = softcap, e = label_smoothing,
    n columns, of a row x with the target t::

        y = s tanh(x / s)           (Gemma Team 2024, "Gemma 2"; y = x if s is 0)
        l = log(sum(exp(y)))
        loss = l - (1 - e) y[t] - e mean(y) + z_loss l^2

    Smoothing is that of Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision"; z_loss that
    of Chowdhery et al. 2022, "PaLM". Arithmetic is in float32 (float64 for float64 tensors), rounded once.

    Args:
        logits: ``[rows, columns]``: float32, bfloat16, float16 (float64: reference only).
        target: int64 ``[rows]``: columns, or `ignore_index`: such a row's loss and gradient are 0, whatever it holds.
        ignore_index: any number, a column's too.
        label_smoothing: at least 0, at most 1.
        z_loss: factor of the square.
        softcap: at least 0; 0 for none.
        gradient: whether `logits` become the gradient; otherwise they stay.

    Returns:
        float32 (float64 for float64 tensors), ``[rows]``.

    Raises:
        InvalidTensorError: shapes, dtypes, devices or options do not fit, or a target is no column; nothing was
            modified.
    """
    losses: Tensor = _library.call(
        "cross_entropy_", logits, target, ignore_index, label_smoothing, z_loss, softcap, gradient
    )
    if gradient:
        _library.mark_modified([logits])
    return losses


def check_options(label_smoothing: float, softcap: float) -> None:
    """Check what is no tensor."""
    if not 0 <= label_smoothing <= 1:
        raise CheckError(f"label_smoothing is {label_smoothing}; expected at least 0 and at most 1")
    if not 0 <= softcap < float("inf"):
        raise CheckError(f"softcap is {softcap}; expected a bound above 0, or 0 for none")


def check_target(target: Tensor, first: Tensor, rows: int) -> None:
    """Check the tensor of targets, but not its numbers."""
    check_device("target", target, first)
    check_dtype("target", target, torch.int64)
    if target.shape != (rows,):
        raise CheckError(f"target has shape {list(target.shape)}; expected [{rows}], one for each row")


def check_range(target: Tensor, columns: int, ignore_index: int) -> None:
    """Check the numbers, for which the host waits."""
    wrong = ((target < 0) | (target >= columns)) & (target != ignore_index)
    if bool(wrong.any()):
        raise CheckError(
            f"target has an entry {int(target[wrong][0])}; expected at least 0 and less than {columns}, "
            f"or {ignore_index}, which is ignored"
        )


def _check(logits: Tensor, target: Tensor, label_smoothing: float, softcap: float) -> None:
    check_first("logits", logits)
    if logits.dim() != 2:
        raise CheckError(f"logits has shape {list(logits.shape)}; expected [rows, columns]")
    check_target(target, logits, logits.shape[0])
    check_options(label_smoothing, softcap)


@_library.op(
    "cross_entropy_(Tensor(a!) logits, Tensor target, int ignore_index, float label_smoothing, float z_loss, "
    "float softcap, bool gradient) -> Tensor",
    check=_check,
    outputs=lambda logits: logits.new_empty(logits.shape[0], dtype=working(logits)),
)
def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    gradient: bool,
) -> Tensor:
    """``ds_plugin::cross_entropy_`` in plain torch, on any device."""
    check_written("logits", logits)
    check_range(target, logits.shape[1], ignore_index)
    ignored = (target == ignore_index).unsqueeze(1)
    if logits.shape[1] == 0:  # all targets are ignored
        return logits.new_zeros(logits.shape[0], dtype=working(logits))
    x = logits.to(working(logits))
    y = softcap * torch.tanh(x / softcap) if softcap else x
    top = y.amax(dim=1, keepdim=True)
    e = torch.exp(y - top)
    total = e.sum(dim=1, keepdim=True)
    logsumexp = top + torch.log(total)
    chosen = torch.where(ignored, 0, target.unsqueeze(1))
    losses = logsumexp - (1 - label_smoothing) * y.gather(1, chosen) + z_loss * logsumexp**2
    if label_smoothing:
        losses = losses - label_smoothing * y.mean(dim=1, keepdim=True)
    if gradient:
        grad = e * ((1 + 2 * z_loss * logsumexp) / total) - label_smoothing / logits.shape[1]
        grad.scatter_add_(1, chosen, torch.full_like(total, label_smoothing - 1))
        if softcap:
            # The derivative of tanh: 1 - tanh^2 would lose all digits where tanh is near 1.
            falling = torch.exp(-2 / softcap * x.abs())
            grad *= 4 * falling / (1 + falling) ** 2
        logits.copy_(grad.masked_fill_(ignored, 0))
    return losses.masked_fill_(ignored, 0).squeeze(1)


def losses_of_columns(
    logits: Tensor,
    target: Tensor,
    ignored: Tensor,
    columns: int,
    total: Callable[[Tensor], None],
    largest: Callable[[Tensor], None],
    *,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    gradient: bool,
) -> Tensor:
    """`cross_entropy_` of rows whose columns are divided among ranks, in plain torch on any device.

    Args:
        logits: ``[rows, this rank's columns]``; they become their part of the gradient.
        target: int64 ``[rows]``, counted from this rank's first column; below 0 or beyond its last it is another one's.
        ignored: bool ``[rows]``.
        columns: of all ranks.
        total, largest: sums, and largest numbers, over the ranks, in place.

    Returns:
        As `cross_entropy_`, the same on all ranks.
    """
    x = logits.to(working(logits))
    y = softcap * torch.tanh(x / softcap) if softcap else x
    top = x.new_full((len(x),), -torch.inf) if x.shape[1] == 0 else y.amax(dim=1)
    largest(top)
    e = torch.exp(y - top.unsqueeze(1))
    own = ((target >= 0) & (target < x.shape[1]) & ~ignored).unsqueeze(1)
    chosen = torch.where(own, target.unsqueeze(1), 0)
    of_target = torch.where(own, y.gather(1, chosen), 0) if x.shape[1] else own.to(x.dtype)
    sums = torch.stack([e.sum(dim=1), of_target.squeeze(1), y.sum(dim=1)])
    total(sums)
    logsumexp = top + torch.log(sums[0])
    losses = logsumexp - (1 - label_smoothing) * sums[1]
    if z_loss:
        losses = losses + z_loss * logsumexp**2
    if label_smoothing:  # the sum is infinite where a column is masked by -inf
        losses = losses - label_smoothing / columns * sums[2]
    if gradient:
        grad = e.mul_(((1 + 2 * z_loss * logsumexp) / sums[0]).unsqueeze(1)).sub_(label_smoothing / columns)
        if x.shape[1]:
            grad.scatter_add_(1, chosen, own * torch.full_like(of_target, label_smoothing - 1))
        if softcap:
            falling = torch.exp(-2 / softcap * x.abs())  # as in `cross_entropy_reference`
            grad *= 4 * falling / (1 + falling) ** 2
        logits.copy_(grad.masked_fill_(ignored.unsqueeze(1), 0))
    return losses.masked_fill_(ignored, 0)


__all__ = ["cross_entropy_"]
