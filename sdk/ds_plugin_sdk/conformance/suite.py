"""Finding the checks: one module, or package, for each level."""

from __future__ import annotations

import importlib
import importlib.util

from ds_plugin_sdk.conformance.check import Check, declared
from ds_plugin_sdk.conformance.outcome import LEVELS


def checks() -> tuple[Check, ...]:
    """Every check, in the order of levels and clauses."""
    for level in LEVELS:
        module = f"ds_plugin_sdk.conformance.{level}"
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    return declared()
