"""``ds_plugin::dropout_add`` and its derivative; seeds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._references import working
from ds_plugin_sdk.ops.transformer._parts import (
    check_dropout,
    check_sum,
    columns_of,
    contiguous,
    drop,
    empty_columns,
    sum_of,
)


def new_seed(count: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """Seeds for dropouts, drawn from torch's default generator of a device: ``torch.manual_seed`` repeats them.

    Recomputation under `torch.utils.checkpoint` and DeepSpeed's checkpointing restores that generator, and so draws the
    same seeds and the same masks again. Nothing waits for the device, and a captured graph drops others in each replay.

    Args:
        count: how many; each dropout of a step wants one of its own.
        device: where the tensors that are dropped lie.

    Returns:
        int64, ``[count]``.
    """
    return torch.randint(2**63 - 1, (count,), dtype=torch.int64, device=device)


def dropout_add(
    input: Tensor,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """``residual + dropout(input + bias)``; dropout sets to zero, or divides by ``1 - p``.

    Args:
        input: ``[..., columns]``: float32, bfloat16, float16 (float64: reference only).
        residual: shape and dtype of input; nothing is added if None.
        bias: ``[columns]``, the dtype of input.
        p: the share that is dropped, at least 0 and less than 1.
        seed: int64, one element (`new_seed`); None only if `p` is 0.

    Returns:
        A new contiguous tensor of input's shape and dtype.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or `p` is out of range.
    """
    result: Tensor = _library.call("dropout_add", input, bias, residual, seed, p)
    return result


def _save_dropout_add(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, residual, seed, ctx.p = inputs
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.save_for_backward(seed)


def _derive_dropout_add(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    grad_input, grad_bias = _library.call("dropout_add_backward", grad_output, seed, ctx.p, ctx.has_bias)
    return grad_input, grad_bias if ctx.has_bias else None, grad_output if ctx.has_residual else None, None, None


@_library.op(
    "dropout_add(Tensor input, Tensor? bias, Tensor? residual, Tensor? seed, float p) -> Tensor",
    check=check_sum,
    outputs=lambda input: input.new_empty(input.shape),
    autograd=_library.Autograd(_derive_dropout_add, _save_dropout_add),
)
def dropout_add_reference(
    input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float
) -> Tensor:
    """``ds_plugin::dropout_add`` in plain torch; arguments as in `dropout_add`, in the schema's order."""
    return sum_of(input, bias, residual, seed, p)


def _check_backward(grad_output: Tensor, seed: Tensor | None, p: float) -> None:
    check_dropout(grad_output, seed, p)


def _new_gradients(grad_output: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    return grad_output.new_empty(grad_output.shape), empty_columns(grad_output, bias)


@_library.op(
    "dropout_add_backward(Tensor grad_output, Tensor? seed, float p, bool bias) -> (Tensor, Tensor)",
    check=_check_backward,
    outputs=_new_gradients,
)
def dropout_add_backward_reference(
    grad_output: Tensor, seed: Tensor | None, p: float, bias: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of input and of bias; of `residual` it is `grad_output`.

    Args:
        grad_output: of the result.
        seed, p: as in `dropout_add`.
        bias: whether there was one; its gradient has no elements otherwise.
    """
    grad = drop(grad_output.to(working(grad_output)), seed, p)
    return contiguous(grad, grad_output), columns_of(grad, grad_output, bias)
