"""How a defective kernel takes the place of a correct one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.target import Target

Kernel = Callable[..., Any]

# A registration lasts as long as its library object.
_registrations: list[Any] = []


def kernel(target: Target, op: str, function: Kernel) -> Target:
    """Register a defective kernel for the target's device over the one that is there.

    Args:
        function: ``function(original, *arguments)``, arguments in the schema's order; ``original(*arguments)`` computes
            what is right.
    """
    info = op_info.find(op)
    op_builder.load_family(info.family, target.device_type)
    original = getattr(torch.ops.ds_plugin_reference, op).default
    _register("ds_plugin", op, lambda *arguments: function(original, *arguments), target)
    return target


def reference_kernel(target: Target, op: str, function: Kernel) -> Target:
    """The same for the reference implementation alone, which float64 takes."""
    assert op_info.find(op)  # whose module defines the op
    overload = getattr(torch.ops.ds_plugin_reference, op).default
    # The reference itself, below the registration that is to hide it.
    original = functools.partial(overload._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)
    _register("ds_plugin_reference", op, lambda *arguments: function(original, *arguments), target)
    return target


def _register(namespace: str, op: str, function: Kernel, target: Target) -> None:
    library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]  # torch gives it no type
    key = "CPU" if target.device_type == "cpu" else "PrivateUse1"
    library.impl(op, function, key, allow_override=True)
    _registrations.append(library)


def fake(target: Target, op: str, function: Kernel) -> Target:
    """Register a defective fake kernel over the one that is there."""
    assert op_info.find(op)  # whose module defines the op
    torch.library.register_fake(f"ds_plugin::{op}", function, allow_override=True)
    return target
