"""Linear layers in training, for CPUs that multiply 16-bit numbers more slowly than float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ds_plugin_sdk.ops._products import product, product_dtype

# Multiplications below which what is saved, some 0.1 ms, is no more than what a function of Python's takes; rows below
# which to make the weight float32 takes longer.
_LEAST = 1 << 24
_ROWS = 128


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, forward and backward in float32 where a CPU is slow at 16-bit numbers.

    Most CPUs are: without AMX, or AVX512-BF16 on AMD's, torch's product of bfloat16 takes two to three times as long as
    that of float32. There operands are made float32, tens of MiB at a time; sums are in float32 and rounded once, as in
    torch's. All other calls are torch's: other devices and dtypes, small products, subclasses of tensors,
    `torch.compile`, `torch.func`, forward-mode derivatives.

    What is kept for the backward pass is the weight itself, not a view of it: what ZeRO 3 takes out of memory in
    between it has gathered again by then. Differentiable as often as torch's.

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


def multiplies(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `multiply` does what torch's linear does, and sooner. Weights are ``[out, in]``, or ``[in, out]``."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if not all(type(each) in (Tensor, nn.Parameter) for each in tensors):
        return False
    if is_watched():
        return False
    cast = autocast_to(input)
    dtype = input.dtype if cast is None else cast
    return (
        dtype in (torch.bfloat16, torch.float16)
        and product_dtype(input.new_empty(0, dtype=dtype)) != dtype
        and weight.dim() == 2
        and input.dim() > 0
        and input.numel() >= _ROWS * max(input.shape[-1], 1)
        and input.numel() * weight.numel() >= _LEAST * max(input.shape[-1], 1)
        and all(each.device == input.device and each.layout == torch.strided for each in tensors)
        and (cast is not None or all(each.dtype == dtype for each in tensors))
    )


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
    """The product where `multiplies` says so; `transposed` for a weight that is ``[in, out]``."""
    dtype = autocast_to(input)
    if dtype is not None:
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    result: Tensor = _Linear.apply(rows, weight, bias, transposed)  # type: ignore[no-untyped-call]  # torch's
    return result.view(*input.shape[:-1], result.shape[1])


def autocast_to(input: Tensor) -> torch.dtype | None:
    """What torch's linear casts its arguments to at the moment; None if it does not."""
    device_type = input.device.type
    if input.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def is_watched() -> bool:
    """Whether torch's own functions are to be seen: by compilers, `torch.func`, forward-mode derivatives, modes."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._is_torch_function_mode_enabled()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.transposed = transposed
        return product(input, weight if transposed else weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        input, weight = ctx.saved_tensors
        # A gradient that is to be derived again is one of torch's products.
        by: Callable[[Tensor, Tensor], Tensor] = torch.mm if torch.is_grad_enabled() else product
        of_input, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            by(grad, weight.t() if ctx.transposed else weight) if of_input else None,
            (by(input.t(), grad) if ctx.transposed else by(grad.t(), input)) if of_weight else None,
            grad.sum(dim=0) if of_bias else None,
            None,
        )


__all__ = ["Linear", "autocast_to", "is_watched", "linear", "multiplies", "multiply"]
