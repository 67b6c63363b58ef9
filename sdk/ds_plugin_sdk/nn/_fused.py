"""Functions that one op computes, as often differentiable as torch's own code for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_plugin_sdk.ops._first_call import is_native
from ds_plugin_sdk.ops._watched import is_watched
from ds_plugin_sdk.ops.linear_cross_entropy import is_batched

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements below which what a function of Python's takes is no less than what is saved.
_LEAST = 1 << 15


class Fused(NamedTuple):
    """A function of tensors, the first of which decides on dtype and device, and of options.

    Attributes:
        op, family: whose kernel computes it.
        fits: ``fits(*tensors)``: whether shapes are those of the op.
        forward: ``forward(*tensors, **options)`` -> the result, and tensors to keep.
        backward: ``backward(grad, *kept, **options)`` -> a gradient or None for each tensor.
        plain: ``plain(*tensors, **options)``: what `forward` gives, by torch's own functions.
        plain_backward: ``plain_backward(grad, *kept, **options)``: what `backward` gives, likewise. None: `plain` is
            derived; the first that are kept are the tensors then.
    """

    op: str
    family: str
    fits: Callable[..., bool]
    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    plain: Callable[..., Tensor]
    plain_backward: Callable[..., tuple[Tensor | None, ...]] | None = None

    def serves(self, *tensors: Tensor) -> bool:
        """Whether `call` does what `plain` does, and sooner; of what is no tensor, it does not."""
        return self.may_serve(*tensors) and self.fits(*tensors)

    def may_serve(self, *tensors: Tensor) -> bool:
        """The same, if shapes and dtypes `fits`: no subclasses, compilers, `torch.func` or modes of functions, a device
        with a kernel of its own, and not too few elements.
        """
        first = tensors[0]
        return (
            not is_watched(operators=False)
            and all(type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided for each in tensors)
            and not any(each.is_nested or each.is_inference() for each in tensors)
            and first.dtype in _DTYPES
            and first.numel() >= _LEAST
            and all(each.device == first.device for each in tensors)
            and is_native(self.op, self.family, first.device.type)
        )

    def call(self, *tensors: Tensor, **options: Any) -> Tensor:
        """The result by the op, where it `serves`."""
        result: Tensor = _Function.apply(self, options, *tensors)  # type: ignore[no-untyped-call, unused-ignore]  # before 2.15 torch gives it no type
        return result

    def __call__(self, *tensors: Tensor, **options: Any) -> Tensor:
        return self.call(*tensors, **options) if self.serves(*tensors) else self.plain(*tensors, **options)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: Fused, options: dict[str, Any], *tensors: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():  # an op's own derivative would be asked for, by Python
            result, kept = fused.forward(*tensors, **options)
        ctx.save_for_backward(*kept)
        ctx.fused, ctx.options = fused, options
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        fused: Fused = ctx.fused
        backward = fused.backward
        # What is to be derived again, or stands for several gradients, is for torch's own operations. A compiled
        # backward pass records nothing that could be derived.
        is_compiled = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        if not is_compiled and (torch.is_grad_enabled() or is_batched(grads[0]) or is_watched(operators=False)):
            backward = fused.plain_backward or functools.partial(_derived, fused.plain, ctx.needs_input_grad[2:])
        return None, None, *backward(grads[0], *ctx.saved_tensors, **ctx.options)


def _derived(
    plain: Callable[..., Tensor], wanted: tuple[bool, ...], grad: Tensor, *kept: Tensor, **options: Any
) -> tuple[Tensor | None, ...]:
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Tensors of their own: those that were given may depend on each other, and have hooks.
        tensors = [tensor.view_as(tensor) for tensor in kept[: len(wanted)]]
        result = plain(*tensors, **options)
    # One that required gradients in the forward pass may have been frozen since.
    wanted = tuple(wants and tensor.requires_grad for tensor, wants in zip(tensors, wanted, strict=True))
    inputs = [tensor for tensor, wants in zip(tensors, wanted, strict=True) if wants]
    found = iter(torch.autograd.grad(result, inputs, grad, create_graph=again) if inputs else ())
    return tuple(next(found) if wants else None for wants in wanted)
