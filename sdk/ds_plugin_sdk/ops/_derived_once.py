"""Derivatives that kernels compute, which have no derivatives themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.errors import SdkError

Backward = Callable[..., tuple[Tensor | None, ...]]


def derived_once(op: str, backward: Backward, *, nonlinear: bool = False) -> Backward:
    """``backward(ctx, *grads)``, whose gradients are an error where they are derived again.

    What a kernel computes is a constant to autograd: a second derivative would be wrong without a word. A gradient that
    is asked for with ``create_graph=True`` and derived no further, as `torch.func.grad` has it, is none.

    Args:
        nonlinear: the gradients depend on the op's arguments, also where nothing that was saved tells autograd so.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        gradients = [each for each in found if each is not None]
        sources = [each for each in (*grads, *ctx.saved_tensors) if each is not None]
        if nonlinear:
            sources.append(torch.empty(0, requires_grad=True))
        constants = iter(_Constants.apply(op, len(gradients), *gradients, *sources))  # type: ignore[no-untyped-call, unused-ignore]  # before 2.15 torch gives it no type
        return tuple(None if each is None else next(constants) for each in found)

    return run


class _Constants(torch.autograd.Function):
    """The first `count` tensors, which depend on all of them in a way that is not known."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.view_as(each) for each in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise SdkError(
            "no derivative of a gradient",
            op=ctx.op,
            why="its kernels compute first derivatives alone (create_graph=True was asked for)",
            hint="compute what is derived twice with torch's own functions",
        )
