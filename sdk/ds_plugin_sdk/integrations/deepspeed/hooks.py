"""The hooks that DeepSpeed registers on the modules of a model that it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Those of ZeRO, and what it wraps them in for profilers.
_MODULES = ("deepspeed.runtime.zero.", "deepspeed.utils.nvtx")


def moves_parameters_alone(hook: Callable[..., Any]) -> bool:
    """Whether a module's hook is ZeRO's: it gathers and frees parameters, whatever the module computes."""
    return str(getattr(hook, "__module__", "")).startswith(_MODULES)


__all__ = ["moves_parameters_alone"]
