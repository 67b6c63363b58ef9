"""What DeepSpeed puts around the modules of a model that it trains, and in the place of torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Those of ZeRO, and what it wraps them in for profilers.
_MODULES = ("deepspeed.runtime.zero.", "deepspeed.utils.nvtx")


def moves_parameters_alone(hook: Callable[..., Any]) -> bool:
    """Whether a module's hook is ZeRO's: it gathers and frees parameters, whatever the module computes."""
    return str(getattr(hook, "__module__", "")).startswith(_MODULES)


def is_linear_of_zero(function: Callable[..., Any]) -> bool:
    """Whether it is what ZeRO 3 puts in the place of ``torch.nn.functional.linear``: it keeps no view of the weight."""
    return getattr(function, "__module__", None) == "deepspeed.runtime.zero.linear"


__all__ = ["is_linear_of_zero", "moves_parameters_alone"]
