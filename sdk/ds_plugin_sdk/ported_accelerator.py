"""`PortedAccelerator`: for an accelerator class that was written against DeepSpeed's abstract class of any release.

    - from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
    - class XPU_Accelerator(DeepSpeedAccelerator):
    + from ds_plugin_sdk import PortedAccelerator
    + class XPU_Accelerator(PortedAccelerator):

What the class lacks, the SDK's defaults answer. Methods whose arguments changed between releases are made to take what
any release passes. `docs/porting.md` says what can then be deleted.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ds_plugin_sdk.accelerator import DeepSpeedAccelerator

# Members whose arguments changed: initial_seed lost one in 0.14.3, range_push and range_pop gained some in 0.19.0,
# pin_memory had align_bytes and has make_copy and match_shape since 0.19.6.
_CHANGED = ("initial_seed", "pin_memory", "range_pop", "range_push")


class PortedAccelerator(DeepSpeedAccelerator):
    """An accelerator class of DeepSpeed's own kind, made to fit every release of DeepSpeed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _CHANGED:
            method = cls.__dict__.get(name)
            if method is not None:
                setattr(cls, name, _pin_memory(method) if name == "pin_memory" else _tolerant(method))


def _tolerant(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, called with those arguments only that it knows; one that it needs and does not get is None."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    names = {parameter.name for parameter in parameters}
    needed = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = {name: value for name, value in kwargs.items() if name in names}
        missing = {name: None for name in needed[len(args) :] if name not in known}
        return method(self, *args[: len(parameters)], **known, **missing)

    return call


def _pin_memory(method: Callable[..., Any]) -> Callable[..., Any]:
    """An old `pin_memory` always copies and keeps the shape; without ``match_shape`` the result has one dimension."""
    if "make_copy" in inspect.signature(method).parameters:
        return method

    @functools.wraps(method)
    def pin_memory(self: Any, tensor: Any, make_copy: bool = True, match_shape: bool = True, **_: Any) -> Any:
        pinned = method(self, tensor)
        return pinned if match_shape else pinned.reshape(-1)

    return pin_memory
