"""Lion over lists of tensors: ``ds_plugin::lion_``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._c_function import CFunction
from ds_plugin_sdk.ops._checks import TensorLists, check_dtypes, check_lists, check_memory
from ds_plugin_sdk.ops._references import working

# param, grad, exp_avg, or lists of them; lr, beta1, beta2, weight_decay. DeepSpeed's optimizer calls for each tensor.
c_function = CFunction("lion")


def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> None:
    """One step of Lion on every tensor of a list, in place.

    With gradient g::

        c <- beta1 * m + (1 - beta1) * g
        p <- p - lr * weight_decay * p - lr * sign(c)
        m <- beta2 * m + (1 - beta2) * g

    after Chen et al. 2023. The sign of a zero is 0, and that of NaN is NaN. Arithmetic is in float32 (float64 for
    float64 tensors) and rounded to the tensors' dtypes once. Autograd does not record the step; tensors that it writes
    count as modified.

    Args:
        params: the parameters p, any shapes: float32, bfloat16, float16 (float64: reference only).
        grads: the gradients g, shapes of params: the dtype of params, or float32. Not modified.
        exp_avgs: the moments m, shapes of params: the dtype of params, or float32.
        lr: learning rate.
        betas: decay of the moment in the direction and in the state, beta1 and beta2.
        weight_decay: decay of the parameters; nothing is taken off if it is 0.

    Raises:
        InvalidTensorError: lengths, shapes, dtypes, devices or memory do not fit; nothing was modified.
    """
    lists, numbers = (params, grads, exp_avgs), (lr, *betas, weight_decay)
    if not c_function.update(lists, *numbers):
        _library.call("lion_", *lists, *numbers)
    _library.mark_modified(params, exp_avgs)


def _lists(params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor]) -> TensorLists:
    return {"params": params, "grads": grads, "exp_avgs": exp_avgs}


def _check(params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor]) -> None:
    lists = _lists(params, grads, exp_avgs)
    check_lists(lists)
    check_dtypes(lists)


@_library.op(
    "lion_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
    "float lr, float beta1, float beta2, float weight_decay) -> ()",
    check=_check,
)
def lion_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """``ds_plugin::lion_`` in plain torch, on any device; arguments as in `lion_`, in the schema's order."""
    check_memory(_lists(params, grads, exp_avgs), ("params", "exp_avgs"))
    for p, grad, m in zip(params, grads, exp_avgs, strict=True):
        dtype = working(p)
        param, g, first = p.to(dtype), grad.to(dtype), m.to(dtype)
        direction = beta1 * first + (1 - beta1) * g
        # torch.sign makes 0 of NaN, which would hide a broken gradient.
        change = lr * torch.where(direction.isnan(), direction, direction.sign())
        if weight_decay:
            change = change + lr * weight_decay * param
        p.copy_(param - change)
        m.copy_(beta2 * first + (1 - beta2) * g)


__all__ = ["lion_", "lion_reference"]
