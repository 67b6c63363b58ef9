"""Whether somebody looks at the functions or operators of torch that a program calls."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

# Where the mode is that torch.set_default_device sets: it changes no product.
_DEFAULT_DEVICE = "torch.utils._device"


def is_watched(*, operators: bool = True) -> bool:
    """Whether torch's own functions are to be seen: by compilers, `torch.func`, forward-mode derivatives, modes.

    Args:
        operators: by modes that see every operator, which may count them or keep results of some, too.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or is_transformed()
        or (operators and torch._C._len_torch_dispatch_stack() > 0)
        or any(
            type(torch._C._get_function_stack_at(index)).__module__ != _DEFAULT_DEVICE
            for index in range(torch._C._len_torch_function_stack())
        )
    )


def is_transformed() -> bool:
    """Whether `torch.func` or forward-mode derivatives are at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


__all__ = ["is_transformed", "is_watched"]
