"""Ops without derivatives, where gradients are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.errors import SdkError


def underived(op: str, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``run(op, *args)``, of whose results a backward pass is an error.

    Without that autograd would go past the op, and the gradients of what is before it would be wrong. Lists of tensors
    are those that optimizers step through, and stay as they are.
    """
    found = _Underived.apply(op, run, *args)  # type: ignore[no-untyped-call, unused-ignore]  # before 2.15 torch gives it no type
    works_in_place = not getattr(torch.ops.ds_plugin, op).default._schema.returns
    return None if works_in_place else found


class _Underived(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(op: str, run: Callable[..., Any], *args: Any) -> Any:
        result = run(op, *args)
        return args[0] if result is None else result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, _, *args = inputs
        ctx.shapes = [each.shape if isinstance(each, Tensor) else None for each in args]
        if output is args[0]:  # it was written
            ctx.mark_dirty(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if shape is None else _raise(grads[0], ctx.op, shape) for shape in ctx.shapes)


# An op, since `torch.compile` traces the backward pass of what may never run it.
@torch.library.custom_op("ds_plugin_errors::no_derivative", mutates_args=())
def _raise(grad: Tensor, op: str, shape: Sequence[int]) -> Tensor:
    raise SdkError(
        "no derivative",
        op=op,
        why="it is for inference, and something before it requires gradients",
        hint="ds_plugin_sdk.nn has functions with derivatives; without them, torch.no_grad()",
    )


@_raise.register_fake
def _traced(grad: Tensor, op: str, shape: Sequence[int]) -> Tensor:
    return grad.new_empty(shape)
