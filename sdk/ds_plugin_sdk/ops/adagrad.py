"""Adagrad over lists of tensors: ``ds_plugin::adagrad_``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._multi_tensor import check_dtypes, check_lists, check_memory, mark_modified


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
        params: the parameters p, any shapes: float32, bfloat16, float16 (float64 by the reference alone).
        grads: the gradients g, shapes of params: the dtype of params, or float32. Not modified.
        state_sums: the sums of squares s, shapes of params: the dtype of params, or float32.
        lr: learning rate.
        eps: added to the denominator.
        weight_decay: times the parameter, added to the gradient; nothing is added if it is 0.

    Raises:
        InvalidTensorError: lengths, shapes, dtypes, devices or memory do not fit; nothing was modified.
    """
    _library.call("adagrad_", params, grads, state_sums, lr, eps, weight_decay)
    mark_modified(params, state_sums)


@torch.no_grad()
def adagrad_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state_sums: Sequence[Tensor],
    lr: float,
    eps: float,
    weight_decay: float,
) -> None:
    """``ds_plugin::adagrad_`` in plain torch, on any device; arguments as in `adagrad_`, in the schema's order."""
    lists = _check(params, grads, state_sums)
    check_memory("adagrad_", lists, ("params", "state_sums"))
    for p, grad, state_sum in zip(params, grads, state_sums, strict=True):
        working = torch.promote_types(p.dtype, torch.float32)
        param, g = p.to(working), grad.to(working)
        if weight_decay:
            g = g + weight_decay * param
        total = state_sum.to(working) + g * g
        p.copy_(param - lr * g / (total.sqrt() + eps))
        state_sum.copy_(total)


def _fake(params: Sequence[Tensor], grads: Sequence[Tensor], state_sums: Sequence[Tensor], *numbers: float) -> None:
    _check(params, grads, state_sums)


def _check(
    params: Sequence[Tensor], grads: Sequence[Tensor], state_sums: Sequence[Tensor]
) -> dict[str, Sequence[Tensor]]:
    lists = {"params": params, "grads": grads, "state_sums": state_sums}
    check_lists("adagrad_", lists)
    check_dtypes("adagrad_", lists)
    return lists


_library.define(
    "adagrad_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state_sums, "
    "float lr, float eps, float weight_decay) -> ()",
    reference=adagrad_reference,
    fake=_fake,
)

__all__ = ["adagrad_", "adagrad_reference"]
