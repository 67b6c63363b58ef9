"""Adagrad over lists of tensors: ``ds_plugin::adagrad_``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._c_function import CFunction
from ds_plugin_sdk.ops._checks import TensorLists, check_dtypes, check_lists, check_memory
from ds_plugin_sdk.ops._references import working

# param, grad, state_sum, or lists of them; lr, eps, weight_decay. DeepSpeed's optimizer calls for each tensor.
c_function = CFunction("adagrad")


def adagrad_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state_sums: Sequence[Tensor],
    *,
    lr: float,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
) -> None:
    """One step of Adagrad on every tensor of a list, in place.

    With gradient g::

        g <- g + weight_decay * p
        s <- s + g^2
        p <- p - lr * g / (sqrt(s) + eps)

    after Duchi, Hazan & Singer 2011. Arithmetic is in float32 (float64 for float64 tensors) and rounded to the tensors'
    dtypes once. NaN and infinity spread as the formula says. Autograd does not record the step; tensors that it writes
    count as modified.

    Args:
        params: the parameters p, any shapes: float32, bfloat16, float16 (float64: reference only).
        grads: the gradients g, shapes of params: the dtype of params, or float32. Not modified.
        state_sums: the sums of squares s, shapes of params: the dtype of params, or float32.
        lr: learning rate.
        eps: added to the denominator.
        weight_decay: times the parameter, added to the gradient; nothing is added if it is 0.

    Raises:
        InvalidTensorError: lengths, shapes, dtypes, devices or memory do not fit; nothing was modified.
    """
    lists, numbers = (params, grads, state_sums), (lr, eps, weight_decay)
    if not c_function.update(lists, *numbers):
        _library.call("adagrad_", *lists, *numbers)
    _library.mark_modified(params, state_sums)


def _lists(params: Sequence[Tensor], grads: Sequence[Tensor], state_sums: Sequence[Tensor]) -> TensorLists:
    return {"params": params, "grads": grads, "state_sums": state_sums}


def _check(params: Sequence[Tensor], grads: Sequence[Tensor], state_sums: Sequence[Tensor]) -> None:
    lists = _lists(params, grads, state_sums)
    check_lists(lists)
    check_dtypes(lists)


@_library.op(
    "adagrad_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state_sums, "
    "float lr, float eps, float weight_decay) -> ()",
    check=_check,
)
def adagrad_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state_sums: Sequence[Tensor],
    lr: float,
    eps: float,
    weight_decay: float,
) -> None:
    """``ds_plugin::adagrad_`` in plain torch, on any device; arguments as in `adagrad_`, in the schema's order."""
    check_memory(_lists(params, grads, state_sums), ("params", "state_sums"))
    for p, grad, state_sum in zip(params, grads, state_sums, strict=True):
        dtype = working(p)
        param, g = p.to(dtype), grad.to(dtype)
        if weight_decay:
            g = g + weight_decay * param
        total = state_sum.to(dtype) + g * g
        p.copy_(param - lr * g / (total.sqrt() + eps))
        state_sum.copy_(total)


__all__ = ["adagrad_", "adagrad_reference"]
