"""What the ops are held against: for each op its formula in float64, calls to try, and tolerances.

One module for each family of the SDK's; a plugin describes its own ops in a module that the attribute `op_info` of its
accelerator names. The generic checks of `ds_plugin_sdk.conformance.ops` run on each.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from ds_plugin_sdk.conformance.op_info.op_info import Make, OpInfo, Sample, close_to
from ds_plugin_sdk.errors import OpError

__all__ = ["Make", "OpInfo", "Sample", "close_to", "described_in", "find", "infos"]


@functools.cache
def infos() -> tuple[OpInfo, ...]:
    """Every op that is described, by family and name."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = [op for module in modules for op in getattr(module, "OPS", ())]
    return tuple(sorted(found, key=lambda op: (op.family, op.name)))


@functools.cache
def described_in(module: str) -> tuple[OpInfo, ...]:
    """The ops that a plugin describes: ``OPS`` of a module.

    Raises:
        OpError: the module cannot be imported or has no such list, or one of its ops has the name of another.
    """
    try:
        ops: tuple[OpInfo, ...] = tuple(importlib.import_module(module).OPS)
    except (ImportError, AttributeError) as error:
        raise OpError(
            f"the ops of {module} cannot be had",
            why=str(error),
            hint="the accelerator's op_info names a module with OPS, a list of OpInfo",
        ) from error
    names = [op.name for op in (*infos(), *ops)]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise OpError(
            f"{module} describes an op whose name is taken", op=twice[0], hint="give it a name of its own: ids have it"
        )
    return ops


def find(name: str) -> OpInfo:
    """The description of an op.

    Raises:
        OpError: there is none.
    """
    for op in infos():
        if op.name == name:
            return op
    raise OpError("this op is not described", op=name, hint=f"add it to a module of {__name__}")
