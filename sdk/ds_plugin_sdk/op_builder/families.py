"""Op families: which DeepSpeed op belongs to which of the SDK's torch ops, and what its user gets to hold.

DeepSpeed asks for an op by a name of its own (``cpu_adam`` and ``fused_adam`` are one family, Adam). The functions it
then calls are its own contract, so the host that knows them registers a module for each name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

# DeepSpeed's op name -> module in ds_plugin_sdk.ops with the schemas and references.
FAMILIES = {
    "cpu_adam": "adam",
    "fused_adam": "adam",
    "cpu_adagrad": "adagrad",
    "fused_adagrad": "adagrad",  # on a device; DeepSpeed has no such op
    "cpu_lion": "lion",
    "fused_lion": "lion",
    "transformer": "transformer",
    "stochastic_transformer": "transformer",
    "fused_lamb": "lamb",
    "quantizer": "quantizer",
    "random_ltd": "random_ltd",
    "spatial_inference": "spatial",
    "utils": "utils",
    # Families that DeepSpeed asks for only as parts of its inference module; their op names are our own.
    "norm": "norm",
    "softmax": "softmax",
    "activation": "activation",
    "rotary": "rotary",
    "residual": "residual",
    "linear": "linear",
    "attention": "attention",
    "fp6": "fp6",
    # DeepSpeed's op of that purpose cannot be right for groups of ranks, and has a name of its own.
    "all_reduce": "all_reduce",
}

_modules: dict[str, str] = {}


def of(name: str) -> str | None:
    """The family of a DeepSpeed op name, or None for an op the SDK does not know."""
    return FAMILIES.get(name)


def define(name: str) -> None:
    """Make sure that the torch ops of a DeepSpeed op name exist, with their references."""
    family = of(name)
    if family is not None:
        importlib.import_module(f"ds_plugin_sdk.ops.{family}")


def register_modules(modules: Mapping[str, str]) -> None:
    """Say which module has the functions that a host calls on an op: op name -> dotted module name."""
    _modules.update(modules)


def module_for(name: str) -> ModuleType | None:
    """The module a host registered for an op, or None."""
    dotted = _modules.get(name)
    return None if dotted is None else importlib.import_module(dotted)
