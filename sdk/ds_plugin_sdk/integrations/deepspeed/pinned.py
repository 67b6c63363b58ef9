"""Page-locked memory by DeepSpeed's own allocator, which ``DS_PIN_MEMORY_BACKEND=native`` asks for."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ds_plugin_sdk.accelerator import DeepSpeedAccelerator


def serve() -> None:
    """Let all accelerators ask DeepSpeed for its allocator, and tell it how much they pin."""
    for method in (_native_pins, _count_pinned):
        setattr(DeepSpeedAccelerator, method.__name__, method)


def _native_pins(accelerator: DeepSpeedAccelerator) -> Any:
    module = _utility("pin_memory")
    return None if module is None else module.get_active_native_pinned_memory()


def _count_pinned(accelerator: DeepSpeedAccelerator, num_bytes: int) -> None:
    module = _utility("pin_memory_tracker")
    if module is not None:
        module.track_pinned_memory(num_bytes)


@functools.cache
def _utility(name: str) -> Any:
    """A module of ``deepspeed.utils``; None in releases before 0.19, which do not have it."""
    try:
        return importlib.import_module(f"deepspeed.utils.{name}")
    except ModuleNotFoundError:
        return None
