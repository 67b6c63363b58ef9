"""Cross entropy of a linear layer's outputs, which are never held: ``ds_plugin::linear_cross_entropy``.

The last layer of a language model gives a number for each token and each word of its vocabulary. They, what the loss
keeps of them and their gradient are most of the memory that a small model's training takes. Here they exist for some
tokens at a time: the loss of a chunk of tokens and its gradients are computed one after the other in the forward pass,
and the backward pass multiplies these by the number that it is given.

The products are torch's, or `ds_plugin_sdk.ops.matmul`'s; between them stands ``ds_plugin::cross_entropy_``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_first, check_other
from ds_plugin_sdk.ops._products import add_product, product, product_dtype
from ds_plugin_sdk.ops._references import working
from ds_plugin_sdk.ops.cross_entropy import check_options, check_range, check_target, losses_of_columns

# Logits of 32 bits at a time, and twice as many of 16: as few as leave products of so few rows as fast as many rows'.
_LOGITS = 1 << 23
_ROWS = 256


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """The sum of the losses of all rows of ``input @ weight.T + bias``, as `cross_entropy_` has them.

    Differentiable once, by input, weight and bias. Gradients are computed here already, of those that need one; float32
    numbers until they are rounded, and so are losses.

    Args:
        input: ``[rows, H]``: float32, bfloat16, float16, float64.
        weight: ``[columns, H]``, the dtype of input.
        target: int64 ``[rows]``: columns, or `ignore_index`. Rows that are ignored have a loss and gradients of 0; on
            the CPU no time is spent on them.
        bias: ``[columns]``, the dtype of input.

    The rest is as in `cross_entropy_`.

    Returns:
        One number, float32 (float64 for float64 tensors).

    Raises:
        InvalidTensorError: shapes, dtypes, devices or options do not fit, or a target is no column.
    """
    tensors = (input, weight, bias)
    gradients = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
    loss: Tensor = _library.call(
        "linear_cross_entropy",
        *(input, weight, target, bias, ignore_index, label_smoothing, z_loss, softcap, *gradients),
    )[0]
    return loss


def check_arguments(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, label_smoothing: float, softcap: float
) -> None:
    """Check all but whether targets are columns.

    Raises:
        CheckError: something does not fit.
    """
    check_first("input", input)
    if input.dim() != 2:
        raise CheckError(f"input has shape {list(input.shape)}; expected [rows, H]")
    if weight.dim() != 2:
        raise CheckError(f"weight has shape {list(weight.shape)}; expected [columns, {input.shape[1]}]")
    check_other("weight", weight, input, (weight.shape[0], input.shape[1]))
    check_other("bias", bias, input, weight.shape[:1])
    check_target(target, input, input.shape[0])
    check_options(label_smoothing, softcap)


def _kept(input: Tensor) -> torch.dtype:
    """The dtype of gradients between the passes: in float16 only what the loss is scaled by brings them into range."""
    return torch.float32 if input.dtype == torch.float16 else input.dtype


def _new_gradients(
    input: Tensor, weight: Tensor, dtype: torch.dtype, input_gradient: bool, weight_gradient: bool, bias_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        input.new_empty(input.shape if input_gradient else 0, dtype=dtype),
        weight.new_empty(weight.shape if weight_gradient else 0, dtype=dtype),
        weight.new_empty(weight.shape[:1] if bias_gradient else 0, dtype=dtype),
    )


def _new_results(
    input: Tensor, weight: Tensor, input_gradient: bool, weight_gradient: bool, bias_gradient: bool
) -> tuple[Tensor, ...]:
    gradients = _new_gradients(input, weight, _kept(input), input_gradient, weight_gradient, bias_gradient)
    return input.new_empty((), dtype=working(input)), *gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    gradients = output[1:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*gradients)
    ctx.save_for_backward(*gradients)
    ctx.dtype, ctx.wanted = inputs[0].dtype, inputs[-3:]


def _derive(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    wants = (ctx.needs_input_grad[place] for place in (0, 1, 3))  # input, weight, bias
    if any(want and not kept for want, kept in zip(wants, ctx.wanted, strict=True)):
        raise SdkError(
            "no gradients were computed",
            op="linear_cross_entropy",
            why="the program was captured where they were not wanted: under torch.no_grad(), or with frozen parameters",
            hint="capture it (torch.export, torch.jit.trace) with gradients recorded",
        )
    input, weight, bias = _scaled(ctx, grad_loss)
    return input, weight, None, bias, *(None,) * 7


def _scaled(ctx: Any, grad_loss: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients that were kept, of those that want one."""
    if torch.is_grad_enabled():
        raise SdkError(
            "no derivative of a gradient",
            op="linear_cross_entropy",
            why="its gradients are computed in the forward pass (create_graph=True was asked for)",
            hint="torch.nn.functional.linear and cross_entropy have second derivatives",
        )
    # The largest of them is as large as the weight: only who asks for them again has them twice in memory.
    again = torch._C._autograd._get_current_graph_task_keep_graph() or is_batched(grad_loss)
    return tuple(
        (gradient * grad_loss if again else gradient.mul_(grad_loss)).to(ctx.dtype)
        if wanted and grad_loss is not None
        else None
        for gradient, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )


def is_batched(tensor: Tensor | None) -> bool:
    """Whether it stands for several under ``vmap``, which cannot be written into one tensor."""
    kinds = torch._C._functorch
    return tensor is not None and (kinds.is_batchedtensor(tensor) or kinds.is_legacy_batchedtensor(tensor))


@_library.op(
    "linear_cross_entropy(Tensor input, Tensor weight, Tensor target, Tensor? bias, int ignore_index, "
    "float label_smoothing, float z_loss, float softcap, bool input_gradient, bool weight_gradient, "
    "bool bias_gradient) -> (Tensor, Tensor, Tensor, Tensor)",
    check=check_arguments,
    outputs=_new_results,
    autograd=_library.Autograd(_derive, _save, raises=True),
)
def linear_cross_entropy_reference(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    input_gradient: bool,
    weight_gradient: bool,
    bias_gradient: bool,
) -> tuple[Tensor, ...]:
    """``ds_plugin::linear_cross_entropy``, on any device: loss and gradients; of those not wanted, no elements."""
    options = ignore_index, label_smoothing, z_loss, softcap
    wanted = input_gradient, weight_gradient, bias_gradient
    if input.device.type == "cpu":
        check_range(target, weight.shape[0], ignore_index)

    def losses_of(logits: Tensor, target: Tensor) -> Tensor:
        return cast(Tensor, _library.call("cross_entropy_", logits, target, *options, any(wanted)))

    kept = _kept(input)
    loss, *gradients = _in_chunks(input, weight, target, bias, ignore_index, wanted, losses_of, weight.shape[0], kept)
    return loss, *(each.to(kept) for each in gradients)


def _in_chunks(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    wanted: tuple[bool, ...],
    losses_of: Callable[[Tensor, Tensor], Tensor],
    most_columns: int,
    kept: torch.dtype,
) -> tuple[Tensor, ...]:
    """The sum of losses, and gradients.

    Args:
        wanted: gradients of input, weight and bias.
        losses_of: the losses of rows of logits, which become their gradients, and targets.
        most_columns: by which the sizes of chunks are chosen.
        kept: the dtype of gradients that are no sums over chunks; the others' is `working(input)`.
    """
    dtype, exact = product_dtype(input), working(input)  # of products, and of sums, which are rounded at their end
    loss = input.new_zeros((), dtype=exact)
    input_gradient, weight_gradient, bias_gradient = wanted
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    counted = _counted(target, ignore_index)
    chunks = _chunks(len(target) if counted is None else len(counted), most_columns, dtype)
    of_input = input.new_zeros(input.shape if input_gradient else 0, dtype=kept)
    of_weight = weight.new_empty(weight.shape if weight_gradient else 0, dtype=exact if len(chunks) > 1 else kept)
    of_bias = weight.new_zeros(weight.shape[:1] if bias_gradient else 0, dtype=exact)
    most = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    memory = input.new_empty(most, weight.shape[0], dtype=dtype)
    for chunk in chunks:
        rows = chunk if counted is None else counted[chunk]
        x = input[rows].to(dtype)
        logits = product(x, w.t(), b, out=memory[: len(x)])
        loss += losses_of(logits, target[rows]).sum()
        if input_gradient:
            of_input[rows] = product(logits, w).to(kept)
        if weight_gradient:
            _add_product(of_weight, logits.t(), x, keep=chunk.start > 0)
        if bias_gradient:
            of_bias += logits.sum(dim=0, dtype=exact)
    if not chunks:
        of_weight.zero_()
    return loss, of_input, of_weight, of_bias


def _chunks(rows: int, columns: int, dtype: torch.dtype) -> list[slice]:
    """Parts of so many rows, as equal as can be."""
    most = max(_ROWS, _LOGITS // max(columns, 1)) * max(1, 4 // dtype.itemsize)
    parts = -(-rows // most)
    size = -(-rows // max(parts, 1))
    return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, max(size, 1))]


def _add_product(total: Tensor, a: Tensor, b: Tensor, keep: bool) -> None:
    """Add ``a @ b`` to a sum, or make it the sum."""
    if total.dtype == a.dtype:
        add_product(total, a, b, beta=int(keep))
    elif keep:
        total += product(a, b)
    else:
        total.copy_(product(a, b))


def _counted(target: Tensor, ignore_index: int) -> Tensor | None:
    """The rows that are not ignored; None for all, or where the host would wait for the device to know them."""
    if target.device.type != "cpu":
        return None
    counted = target.ne(ignore_index).nonzero().squeeze(1)
    return None if len(counted) == len(target) else counted


# ---- columns that are divided among ranks ----------------------------------------------------------------------------
class Columns(NamedTuple):
    """How the columns of a weight are divided among ranks: one after the other, each rank's as many as it likes.

    Attributes:
        sizes: of each rank's part.
        rank: this one.
        total: adds a tensor up over the ranks, in place.
        largest: its largest numbers over the ranks, in place.
    """

    sizes: tuple[int, ...]
    rank: int
    total: Callable[[Tensor], None]
    largest: Callable[[Tensor], None]


def divided_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    columns: Columns,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """`linear_cross_entropy` of a weight whose columns are divided among ranks, which call it together.

    No rank has a logit of another one's columns: of each row they exchange a largest number and two or three sums. Two
    collectives for a chunk of rows, and one for the gradient of the input, which is the whole one on every rank.

    Args:
        weight, bias: this rank's ``[part of the columns, H]`` and ``[part of the columns]``.
        input, target: the same on all ranks.
        columns: who has which.

    The rest, and errors, are as in `linear_cross_entropy`; it is torch's functions on every device.
    """
    tensors = (input, weight, bias)
    wanted = tuple(torch.is_grad_enabled() and each is not None and each.requires_grad for each in tensors)
    try:
        check_arguments(input, weight, target, bias, label_smoothing, softcap)
        check_range(target, sum(columns.sizes), ignore_index)
    except CheckError as error:
        raise _library.invalid("linear_cross_entropy", str(error)) from None
    options = ignore_index, label_smoothing, z_loss, softcap
    return cast(Tensor, _Divided.apply(input, weight, bias, target, columns, wanted, options))  # type: ignore[no-untyped-call, unused-ignore]  # before 2.15 torch gives it no type


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        columns: Columns,
        wanted: tuple[bool, ...],
        options: tuple[int, float, float, float],
    ) -> Tensor:
        ignore_index, label_smoothing, z_loss, softcap = options
        first = sum(columns.sizes[: columns.rank])

        def losses_of(logits: Tensor, target: Tensor) -> Tensor:
            return losses_of_columns(
                logits,
                target - first,
                target == ignore_index,
                sum(columns.sizes),
                columns.total,
                columns.largest,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                softcap=softcap,
                gradient=any(wanted),
            )

        with torch.autocast(input.device.type, enabled=False):
            loss, of_input, *others = _in_chunks(
                *(input, weight, target, bias, ignore_index, wanted, losses_of),
                max(columns.sizes),
                kept=working(input),  # those of the input are parts of sums
            )
        if wanted[0]:
            columns.total(of_input)
        ctx.save_for_backward(*(each.to(_kept(input)) for each in (of_input, *others)))
        ctx.dtype, ctx.wanted = input.dtype, wanted
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_scaled(ctx, grads[0]), None, None, None, None


__all__ = ["Columns", "check_arguments", "divided_linear_cross_entropy", "is_batched", "linear_cross_entropy"]
