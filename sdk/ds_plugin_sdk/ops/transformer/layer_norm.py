"""``ds_plugin::dropout_add_layer_norm`` and its derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_other
from ds_plugin_sdk.ops._references import working
from ds_plugin_sdk.ops.transformer._parts import (
    check_dropout,
    check_statistic,
    check_sum,
    columns_of,
    contiguous,
    drop,
    empty_columns,
    sum_of,
)


def dropout_add_layer_norm(
    input: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Layer norm of ``sum = residual + dropout(input + bias)``.

    That is ``(sum - mean) / sqrt(variance + eps) * weight + norm_bias`` with mean and variance of each row (Ba et al.
    2016). The sum is rounded to input's dtype before. With input alone this is layer norm.

    Args:
        input, residual, bias, p, seed: as in `dropout_add`.
        weight, norm_bias: ``[columns]``, the dtype of input.
        eps: added to the variance.

    Returns:
        The normalised rows, and the sum, both of input's shape and dtype; the sum is `input` itself where nothing is
        done to it. Both can be differentiated.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or `p` is out of range.
    """
    output, total, _, _ = _library.call(
        "dropout_add_layer_norm", input, bias, residual, weight, norm_bias, seed, p, eps
    )
    return output, input if _is_plain(bias, residual, p) else total


def _check(
    input: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    seed: Tensor | None,
    p: float,
) -> None:
    check_sum(input, bias, residual, seed, p)
    check_other("weight", weight, input, input.shape[-1:])
    check_other("norm_bias", norm_bias, input, input.shape[-1:])


def _new_outputs(
    input: Tensor, bias: Tensor | None, residual: Tensor | None, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normed, total = (input.new_empty(input.shape) for _ in range(2))
    mean, rstd = (input.new_empty(input.shape[:-1], dtype=working(input)) for _ in range(2))
    return normed, input.new_empty(0) if _is_plain(bias, residual, p) else total, mean, rstd


def _is_plain(bias: Tensor | None, residual: Tensor | None, p: float) -> bool:
    """Whether the norm is taken of the input itself."""
    return bias is None and residual is None and p == 0


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, bias, residual, weight, _, seed, ctx.p, _ = inputs
    _, total, mean, rstd = output
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.plain = not (ctx.has_bias or ctx.has_residual or ctx.p)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd, *([total] if ctx.plain else []))
    ctx.save_for_backward(input if ctx.plain else total, mean, rstd, weight, seed)


def _derive_norm(
    ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, *others: None
) -> tuple[Tensor | None, ...]:
    total, mean, rstd, weight, seed = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(total)
    if ctx.plain:
        grad_sum = None
    residual, grad_input, grad_weight, norm_bias, bias = _library.call(
        "dropout_add_layer_norm_backward",
        *(grad_output, grad_sum, total, mean, rstd, weight, None, seed, ctx.p, ctx.has_bias),
    )
    grad_input = grad_input if ctx.p else residual
    grad_bias, grad_residual = bias if ctx.has_bias else None, residual if ctx.has_residual else None
    return grad_input, grad_bias, grad_residual, grad_weight, norm_bias, None, None, None


@_library.op(
    "dropout_add_layer_norm(Tensor input, Tensor? bias, Tensor? residual, Tensor weight, Tensor norm_bias, "
    "Tensor? seed, float p, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    outputs=_new_outputs,
    autograd=_library.Autograd(_derive_norm, _save_norm),
)
def dropout_add_layer_norm_reference(
    input: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    seed: Tensor | None,
    p: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``ds_plugin::dropout_add_layer_norm`` in plain torch, on any device.

    Arguments as in `dropout_add_layer_norm`, in the schema's order.

    Returns:
        The normalised rows; the sum, without elements where it is `input` itself; mean and ``1 / sqrt(variance + eps)``
        of each row, float32 (float64 for float64), of input's shape without its last dimension.
    """
    plain = _is_plain(bias, residual, p)
    total = input if plain else sum_of(input, bias, residual, seed, p)
    s = total.to(working(input))
    mean = s.mean(dim=-1, keepdim=True) if s.numel() else s.new_zeros((*s.shape[:-1], 1))
    rstd = ((s - mean).square().sum(dim=-1, keepdim=True) / max(s.shape[-1], 1) + eps).rsqrt()
    normed = (s - mean) * rstd * weight.to(s.dtype) + norm_bias.to(s.dtype)
    kept = input.new_empty(0) if plain else total
    return contiguous(normed, input), kept, mean.squeeze(-1), rstd.squeeze(-1)


def _check_backward(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    rows: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    seed: Tensor | None,
    p: float,
) -> None:
    check_dropout(grad_output, seed, p)
    check_other("grad_sum", grad_sum, grad_output, grad_output.shape)
    check_other("rows", rows, grad_output, grad_output.shape)
    check_other("weight", weight, grad_output, grad_output.shape[-1:])
    check_other("norm_bias", norm_bias, grad_output, grad_output.shape[-1:])
    check_statistic("mean", mean, grad_output)
    check_statistic("rstd", rstd, grad_output)
    if mean is None and norm_bias is None:
        raise CheckError("mean and norm_bias are missing; expected one of them")


def _new_gradients(grad_output: Tensor, p: float, bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_sum, grad_input = (grad_output.new_empty(grad_output.shape) for _ in range(2))
    return (
        grad_sum,
        grad_input if p else grad_output.new_empty(0),
        empty_columns(grad_output, True),
        empty_columns(grad_output, True),
        empty_columns(grad_output, bias),
    )


@_library.op(
    "dropout_add_layer_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor rows, Tensor? mean, Tensor rstd, "
    "Tensor weight, Tensor? norm_bias, Tensor? seed, float p, bool bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_backward,
    outputs=_new_gradients,
)
def dropout_add_layer_norm_backward_reference(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    rows: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    seed: Tensor | None,
    p: float,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `dropout_add_layer_norm`, in plain torch.

    With n the rows before weight and bias, and g the gradient of the result times weight, the gradient of the sum is
    ``rstd (g - mean(g) - n mean(g n))`` (+ `grad_sum`). Where the sum was not kept, n is regained from the result as
    ``(result - norm_bias) / weight``: no weight may be zero then.

    Args:
        grad_output: of the normalised rows.
        grad_sum: of the sum, as far as it comes from elsewhere.
        rows: the sum; or the normalised rows, if `mean` is None.
        mean, rstd: as the op returned them.
        weight: as given to the op.
        norm_bias: as given to the op; used only if `mean` is None.
        seed, p: as in `dropout_add`.
        bias: whether there was one.

    Returns:
        The gradients of residual (that is, of the sum), input, weight, norm_bias, bias. That of input has no elements
        if `p` is 0, since it is that of residual; that of bias has none if there was no bias.
    """
    dtype = working(grad_output)
    grad, gamma, factor = grad_output.to(dtype), weight.to(dtype), rstd.unsqueeze(-1)
    if mean is None:
        assert norm_bias is not None
        normed = (rows.to(dtype) - norm_bias.to(dtype)) / gamma
    else:
        normed = (rows.to(dtype) - mean.unsqueeze(-1)) * factor
    scaled = grad * gamma
    columns = max(weight.numel(), 1)
    first, second = (term.sum(dim=-1, keepdim=True) / columns for term in (scaled, scaled * normed))
    total = factor * (scaled - first - normed * second)
    if grad_sum is not None:
        total = total + grad_sum.to(dtype)
    dropped = drop(total, seed, p)
    return (
        contiguous(total, grad_output),
        contiguous(dropped, grad_output) if p else grad_output.new_empty(0),
        columns_of(grad * normed, grad_output, True),
        columns_of(grad, grad_output, True),
        columns_of(dropped, grad_output, bias),
    )
