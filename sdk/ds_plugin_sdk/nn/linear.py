"""Linear layers in training, for CPUs on which torch's products are slow: of 16 bits on most, of float32 on Zen 5."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.ops._products import is_torchs_slower, is_worth_addmm, product
from ds_plugin_sdk.ops._watched import is_transformed, is_watched
from ds_plugin_sdk.ops.linear_cross_entropy import is_batched

# Multiplications below which what is saved, some 0.1 ms, is no more than what a function of Python's takes; rows below
# which to make the weight float32 takes longer.
_LEAST = 1 << 24
_ROWS = 128


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, forward and backward by the product that is fastest on a CPU.

    Of bfloat16 torch's product takes two to three times as long as that of float32 on most CPUs: those without AMX, or
    AVX512-BF16 on AMD's. There operands are made float32, tens of MiB at a time; sums are in float32 and rounded once,
    as in torch's. Float32 is multiplied by `ds_plugin_sdk.ops.matmul` on AMD's CPUs from Zen 5 on, at twice the rate of
    torch's product. All other calls are torch's: other devices and dtypes, small products, subclasses of tensors, modes
    of functions, `torch.compile`, `torch.func`, forward-mode derivatives, gradients of gradients and batches of them.
    Modes of operators see those of torch's. Who has replaced ``torch.nn.functional.linear``, as profilers do, is not
    called for what is multiplied here.

    What is kept for the backward pass is the weight itself, not a view of it, nor a copy under autocast: what ZeRO 3
    takes out of memory in between it has gathered again by then. Differentiable as often as torch's.

    Args:
        input: ``[..., in]``.
        weight: ``[out, in]``, the dtype of input; any under `torch.autocast`, which casts as it casts for torch's.
        bias: ``[out]``, likewise.

    Returns:
        ``[..., out]``.
    """
    return (
        multiply(input, weight, bias) if multiplies(input, weight, bias) else nn.functional.linear(input, weight, bias)
    )


class Linear(nn.Linear):
    """`torch.nn.Linear` by `linear`: the same arguments, parameters and state dicts."""

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``."""
        return linear(input, self.weight, self.bias)


def multiplies(input: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False) -> bool:
    """Whether `multiply` does what torch's linear does, and sooner. Weights are ``[out, in]``, or ``[in, out]``."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if not all(type(each) in (Tensor, nn.Parameter) and is_plain(each) for each in tensors):
        return False
    if is_watched(operators=False):  # who sees operators sees torch's, with what is always kept
        return False
    cast = autocast_to(input)
    dtype = input.dtype if cast is None else cast
    outer, inner = weight.shape[::-1] if transposed and weight.dim() == 2 else (*weight.shape, 0, 0)[:2]
    return (
        dtype in (torch.bfloat16, torch.float16, torch.float32)
        and is_torchs_slower(input.new_empty(0, dtype=dtype))
        and all(each.dtype == dtype if cast is None else _is_cast(each) for each in tensors)
        and weight.dim() == 2
        and input.dim() > 0
        and input.shape[-1] == inner
        and (bias is None or bias.shape == (outer,))
        and input.numel() * outer >= _LEAST
        and (
            is_worth_addmm(input.numel() // max(inner, 1), inner, outer)
            if dtype == torch.float32
            else input.numel() >= _ROWS * max(inner, 1)
        )
    )


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
    """The product where `multiplies` says so; `transposed` for a weight that is ``[in, out]``."""
    dtype = autocast_to(input) or input.dtype
    rows = input.to(dtype).reshape(math.prod(input.shape[:-1]), input.shape[-1])
    bias = None if bias is None else bias.to(dtype)
    result: Tensor = _Linear.apply(rows, weight, bias, transposed)  # type: ignore[no-untyped-call, unused-ignore]  # before 2.15 torch gives it no type
    return result.view(*input.shape[:-1], result.shape[1])


def autocast_to(input: Tensor) -> torch.dtype | None:
    """What torch's linear casts its arguments to at the moment; None if it does not."""
    device_type = input.device.type
    if input.dtype == torch.float64 or not is_autocast(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def is_autocast(device_type: str) -> bool:
    """Whether torch casts the arguments of functions on such a device."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def is_plain(tensor: Tensor) -> bool:
    """Whether it has numbers in memory of the CPU's, a rectangle of them."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_nested


def check_untransformed(name: str, grad: Tensor | None = None) -> None:
    """Check that `torch.func` is not at work, nor gradients for several directions at once, for what has neither.

    Raises:
        SdkError: it is.
    """
    if not torch.compiler.is_compiling() and (is_transformed() or is_batched(grad)):
        raise SdkError(
            "no torch.func, and no batch of gradients",
            op=name,
            why="vmap, grad, jvp, jacobian(vectorize=True) or is_grads_batched=True asked for them",
            hint="call it outside of them, or build the layer of torch's own functions and those of ds_plugin_sdk.nn",
        )


class _Linear(torch.autograd.Function):
    """Of input and bias of one dtype, and a weight that may be wider: autocast keeps no copy of it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        for_input, for_weight, *_ = ctx.needs_input_grad
        # The first tells activation checkpointing that a pass was torch's, because of a mode of functions: torch keeps
        # the weight transposed, which a square one does not show.
        first = input.new_empty(0)
        ctx.save_for_backward(first, input if for_weight else None, weight if for_input else None)
        ctx.transposed, ctx.of_weight = transposed, weight.dtype
        weight = weight.to(input.dtype)
        if is_watched():
            return torch._C._nn.linear(input, weight.t() if transposed else weight, bias)
        return product(input, weight if transposed else weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        _, input, weight = ctx.saved_tensors
        # What is to be derived again, or stands for several gradients, is for torch's own operations.
        is_torchs = torch.is_grad_enabled() or is_batched(grad) or is_watched() or type(grad) is not Tensor
        by: Callable[[Tensor, Tensor], Tensor] = torch.mm if is_torchs else product
        of_input = of_weight = None
        if weight is not None:
            weight = weight.to(grad.dtype)
            of_input = by(grad, weight.t() if ctx.transposed else weight)
        if input is not None:
            of_weight = (by(input.t(), grad) if ctx.transposed else by(grad.t(), input)).to(ctx.of_weight)
        return of_input, of_weight, grad.sum(dim=0) if ctx.needs_input_grad[2] else None, None


__all__ = [
    "Linear",
    "autocast_to",
    "check_untransformed",
    "is_autocast",
    "is_plain",
    "linear",
    "multiplies",
    "multiply",
]
