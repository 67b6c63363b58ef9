"""``ds_plugin::add_rms_norm`` and its derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import check_first, check_other
from ds_plugin_sdk.ops._references import working
from ds_plugin_sdk.ops.transformer._parts import check_statistic, columns_of, contiguous, empty_columns, sum_of


def add_rms_norm(
    input: Tensor, weight: Tensor, residual: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """RMS norm of ``sum = input + residual``: ``sum / sqrt(mean(sum^2) + eps) * weight`` (Zhang & Sennrich 2019).

    The sum is rounded to input's dtype before. With input alone this is `ds_plugin_sdk.ops.norm.rms_norm` with a
    derivative.

    Args:
        input: ``[..., columns]``: float32, bfloat16, float16 (float64: reference only).
        weight: ``[columns]``, the dtype of input.
        residual: shape and dtype of input; nothing is added if None.
        eps: added to the mean of squares.

    Returns:
        The normalised rows, and the sum, both of input's shape and dtype; the sum is `input` itself where nothing is
        added. Both can be differentiated.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit.
    """
    output, total, _ = _library.call("add_rms_norm", input, residual, weight, eps)
    return output, input if residual is None else total


def _check(input: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    check_first("input", input)
    check_other("residual", residual, input, input.shape)
    check_other("weight", weight, input, input.shape[-1:])


def _new_outputs(input: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    total = input.new_empty(0 if residual is None else input.shape)
    return input.new_empty(input.shape), total, input.new_empty(input.shape[:-1], dtype=working(input))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, residual, weight, _ = inputs
    _, total, rstd = output
    ctx.adds = residual is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd, *([] if ctx.adds else [total]))
    ctx.save_for_backward(total if ctx.adds else input, rstd, weight)


def _derive(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    rows, rstd, weight = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(rows)
    of_sum = grad_sum if ctx.adds else None
    grad, grad_weight = _library.call("add_rms_norm_backward", grad_output, of_sum, rows, rstd, weight)
    return grad, grad if ctx.adds else None, grad_weight, None


@_library.op(
    "add_rms_norm(Tensor input, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    check=_check,
    outputs=_new_outputs,
    autograd=_library.Autograd(_derive, _save),
)
def add_rms_norm_reference(
    input: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``ds_plugin::add_rms_norm`` in plain torch, on any device.

    Arguments as in `add_rms_norm`, in the schema's order.

    Returns:
        The normalised rows; the sum, without elements where it is `input` itself; ``1 / sqrt(mean(sum^2) + eps)`` of
        each row, float32 (float64 for float64), of input's shape without its last dimension.
    """
    total = input if residual is None else sum_of(input, None, residual, None, 0.0)
    s = total.to(working(input))
    rstd = (s.square().sum(dim=-1, keepdim=True) / max(s.shape[-1], 1) + eps).rsqrt()
    kept = input.new_empty(0) if residual is None else total
    return contiguous(s * rstd * weight.to(s.dtype), input), kept, rstd.squeeze(-1)


def _check_backward(grad_output: Tensor, grad_sum: Tensor | None, rows: Tensor, rstd: Tensor, weight: Tensor) -> None:
    check_first("grad_output", grad_output)
    check_other("grad_sum", grad_sum, grad_output, grad_output.shape)
    check_other("rows", rows, grad_output, grad_output.shape)
    check_other("weight", weight, grad_output, grad_output.shape[-1:])
    check_statistic("rstd", rstd, grad_output)


@_library.op(
    "add_rms_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor rows, Tensor rstd, Tensor weight) "
    "-> (Tensor, Tensor)",
    check=_check_backward,
    outputs=lambda grad_output: (grad_output.new_empty(grad_output.shape), empty_columns(grad_output, True)),
)
def add_rms_norm_backward_reference(
    grad_output: Tensor, grad_sum: Tensor | None, rows: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `add_rms_norm`, in plain torch.

    With n the rows before weight, and g the gradient of the result times weight, the gradient of the sum is
    ``rstd (g - n mean(g n))`` (+ `grad_sum`).

    Args:
        grad_output: of the normalised rows.
        grad_sum: of the sum, as far as it comes from elsewhere.
        rows: the sum.
        rstd: as the op returned it.
        weight: as given to the op.

    Returns:
        The gradients of the sum, which is that of input and residual, and of weight.
    """
    dtype, factor = working(grad_output), rstd.unsqueeze(-1)
    grad, normed = grad_output.to(dtype), rows.to(dtype) * factor
    scaled = grad * weight.to(dtype)
    mean = (scaled * normed).sum(dim=-1, keepdim=True) / max(weight.numel(), 1)
    total = factor * (scaled - normed * mean)
    if grad_sum is not None:
        total = total + grad_sum.to(dtype)
    return contiguous(total, grad_output), columns_of(grad * normed, grad_output, True)
