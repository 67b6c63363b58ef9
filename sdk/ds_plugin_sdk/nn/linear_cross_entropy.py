"""The last layer of a language model and its loss in one, without its outputs in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup, ReduceOp

from ds_plugin_sdk import comm
from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.nn.linear import autocast_to
from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops import linear_cross_entropy as ops
from ds_plugin_sdk.ops._checks import CheckError, is_dtensor
from ds_plugin_sdk.ops._watched import is_transformed

_REDUCTIONS = ("mean", "sum")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    group: ProcessGroup | None = None,
) -> Tensor:
    """``cross_entropy(linear(input, linear_weight, linear_bias), target)``, some rows at a time.

    The arguments are those of `torch.nn.functional.linear_cross_entropy`; the formula is that of
    `ds_plugin_sdk.ops.cross_entropy.cross_entropy_`. Gradients are computed in the forward pass already, of those that
    need one, and kept until the backward pass: weights need not be there any more then. Where gradients are not
    recorded, the loss alone is computed. Differentiable once. Within `torch.func` and forward-mode derivatives it is
    torch's own functions, with all logits at once, without a group, and but for `torch.func` within `torch.compile`.

    Under `torch.autocast` products are in its dtype, as torch's linear has it. The loss is float32.

    Args:
        input: ``[..., H]``, any strides: float32, bfloat16, float16, float64.
        linear_weight: ``[columns, H]``, the dtype of input, any under autocast; it may be that of an embedding.
        target: int64, the shape of input but for the last dimension: columns, or `ignore_index`.
        linear_bias: ``[columns]``.
        reduction: ``mean`` over the rows that are not ignored, or ``sum``. The mean of none is NaN, as torch's is, and
            its gradients are 0.
        ignore_index: such rows do not count; None is -100, as in torch.
        label_smoothing: share of the target that is spread over all columns.
        z_loss: factor of the mean, or sum, of ``logsumexp(logits)^2``.
        softcap: logits become ``softcap tanh(logits / softcap)`` first; 0 for none.
        group: ranks among which the columns are divided, as a vocabulary is in tensor parallelism: the first rank has
            the first columns. They call it together; `linear_weight` and `linear_bias` are this rank's part, all else
            is the same on all ranks, targets count all columns. The gradient of input is the whole one on every rank.

    Returns:
        One number, float32 (float64 for float64 tensors).

    Raises:
        InvalidTensorError: shapes, dtypes, devices or options do not fit, or a target is no column (within
            `torch.func` that is torch's own error); or the ranks of the group have other rows, dtypes or gradients.
        ValueError: another reduction.
    """
    _check_reduction("linear_cross_entropy", reduction)
    _check_kinds(input, linear_weight, target, linear_bias, group)
    ignore_index = -100 if ignore_index is None else ignore_index
    rows = math.prod(input.shape[:-1])
    dtype = autocast_to(input)
    cast: Callable[[Tensor], Tensor] = (lambda tensor: tensor) if dtype is None else lambda tensor: tensor.to(dtype)
    x, weight = cast(input).reshape(rows, input.shape[-1]), cast(linear_weight)
    targets = target.reshape(rows) if target.shape == input.shape[:-1] else target
    bias = None if linear_bias is None else cast(linear_bias)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
    }
    if group is None and _is_transformed():
        loss = _of_all_logits(x, weight, targets, bias, **options)
    elif group is None:
        loss = ops.linear_cross_entropy(x, weight, targets, bias, **options)
    else:
        loss = ops.divided_linear_cross_entropy(x, weight, targets, bias, _columns(x, weight, group), **options)
    if reduction == "sum":
        return loss
    counted = (target != ignore_index).sum()
    return torch.where(counted == 0, torch.nan, loss / counted.clamp(min=1))


def _check_kinds(*arguments: Any) -> None:
    *tensors, group = arguments
    if not torch.compiler.is_compiling() and any(map(is_dtensor, tensors)):
        raise InvalidTensorError(
            "a tensor is a DTensor",
            op="linear_cross_entropy",
            why="expected plain tensors: each rank has its own",
            hint="of a weight that is divided by columns: weight.to_local(), with group=mesh.get_group()",
        )
    if group is not None and not isinstance(group, ProcessGroup):
        what = "this rank is no member of the group" if isinstance(group, int) else f"group is a {type(group).__name__}"
        raise InvalidTensorError(what, op="linear_cross_entropy", why="expected a ProcessGroup that this rank is in")


def _is_transformed() -> bool:
    # torch.compile follows torch.func by itself, and what it compiles depends on this number.
    return forward_ad._current_level >= 0 if torch.compiler.is_compiling() else is_transformed()


def _of_all_logits(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    """`ops.linear_cross_entropy` by torch's own functions, which all of torch's transforms know."""
    try:
        ops.check_arguments(input, weight, target, bias, label_smoothing, softcap)
    except CheckError as error:
        raise _library.invalid("linear_cross_entropy", str(error)) from None
    exact = torch.promote_types(input.dtype, torch.float32)
    with torch.autocast(input.device.type, enabled=False):  # what it casts was cast
        logits = nn.functional.linear(input.to(exact), weight.to(exact), None if bias is None else bias.to(exact))
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        loss = nn.functional.cross_entropy(
            logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
        )
        if z_loss:
            total = logits.logsumexp(dim=-1).masked_fill(target == ignore_index, 0)
            loss = loss + (z_loss * total * total).sum()
    return loss


def _columns(input: Tensor, weight: Tensor, group: ProcessGroup) -> ops.Columns:
    """How the columns of all ranks' weights follow each other.

    Raises:
        InvalidTensorError: what must be the same on all ranks is not; all raise it.
    """
    rank, ranks = group.rank(), group.size()
    wants = torch.is_grad_enabled() and input.requires_grad, torch.is_grad_enabled() and weight.requires_grad
    mine = [weight.shape[:1].numel(), *input.shape, input.element_size(), *map(int, wants)]
    given = torch.zeros(ranks, len(mine), dtype=torch.int64, device="cpu")
    given[rank] = torch.tensor(mine, device="cpu")
    given = given.to(input.device)
    comm.all_reduce(given, group=group)
    sizes, *same = given.cpu().t().tolist()
    if any(len({*each}) > 1 for each in same):
        raise InvalidTensorError(
            "the ranks differ",
            op="linear_cross_entropy",
            why=f"rows, H, bytes of a number, and who wants gradients, by rank: {[*zip(*same, strict=True)]}",
            hint="with group= the input is the same on all ranks, and all of them record gradients or none",
        )
    return ops.Columns(
        tuple(sizes),
        rank,
        functools.partial(comm.all_reduce, group=group),
        functools.partial(comm.all_reduce, op=ReduceOp.MAX, group=group),
    )


def _check_reduction(name: str, reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{name}: reduction={reduction!r}; expected 'mean' or 'sum'")


class LinearCrossEntropyLoss(nn.Module):
    """A linear layer without outputs, and the loss of what they would be: `linear_cross_entropy`.

    Its parameters have the names, shapes and first values of `torch.nn.Linear`'s, so that state dicts fit. To share an
    embedding's weight, assign it: ``loss.weight = embedding.weight``. They are the module's own, so that DeepSpeed's
    ZeRO 3 gathers them for its forward pass; its backward pass does not read them.

    Args:
        in_features: H.
        num_classes: columns.
        bias: whether the layer has one.
        device, dtype: of the parameters.
        reduction, ignore_index, label_smoothing, z_loss, softcap: as in `linear_cross_entropy`.

    Raises:
        ValueError: another reduction.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        _check_reduction("LinearCrossEntropyLoss", reduction)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within ``1 / sqrt(H)``, as in `torch.nn.Linear`."""
        bound = self.weight.shape[1] ** -0.5 if self.weight.shape[1] else 0.0
        for parameter in self.parameters(recurse=False):
            parameter.uniform_(-bound, bound)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss; arguments and errors as in `linear_cross_entropy`."""
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            linear_bias=self.bias,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )

    def extra_repr(self) -> str:
        """What `print` shows of the module."""
        columns, features = self.weight.shape
        return (
            f"in_features={features}, num_classes={columns}, bias={self.bias is not None}, "
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
            f"z_loss={self.z_loss}, softcap={self.softcap}"
        )
