"""What the ops are held against: for each op its formula in float64, calls to try, and tolerances.

One module for each family; `ALL` has every op. The generic checks of `ds_plugin_sdk.conformance.ops` run on each.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from ds_plugin_sdk.conformance.op_info.op_info import Make, OpInfo, Sample, close_to
from ds_plugin_sdk.errors import OpError

__all__ = ["Make", "OpInfo", "Sample", "close_to", "find", "infos"]


@functools.cache
def infos() -> tuple[OpInfo, ...]:
    """Every op that is described, by family and name."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = [op for module in modules for op in getattr(module, "OPS", ())]
    return tuple(sorted(found, key=lambda op: (op.family, op.name)))


def find(name: str) -> OpInfo:
    """The description of an op.

    Raises:
        OpError: there is none.
    """
    for op in infos():
        if op.name == name:
            return op
    raise OpError("this op is not described", op=name, hint=f"add it to a module of {__name__}")
