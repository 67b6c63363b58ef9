"""Seeded defects: the proof that each check sees what it is there to see. ``make mutants`` runs them.

Modules ``runtime``, ``ops``, ``training`` and ``distributed`` declare them; `ds_plugin_sdk.conformance.mutants.mutant`
says how. A target with one is named ``<target>@<mutant>``, everywhere a target is named:

    sdk conformance cpu@adam.no_bias_correction
"""

from __future__ import annotations

import importlib
import importlib.util

from ds_plugin_sdk.conformance.mutants.mutant import Mutant, declared
from ds_plugin_sdk.conformance.outcome import LEVELS
from ds_plugin_sdk.errors import UnknownAcceleratorError

__all__ = ["Mutant", "all_mutants", "find"]


def all_mutants() -> tuple[Mutant, ...]:
    """Every mutant, in the order of levels and clauses."""
    for level in LEVELS:
        if importlib.util.find_spec(f"{__name__}.{level}") is not None:
            importlib.import_module(f"{__name__}.{level}")
    return declared()


def find(name: str) -> Mutant:
    """The mutant of a name.

    Raises:
        UnknownAcceleratorError: there is none.
    """
    for mutant in all_mutants():
        if mutant.name == name:
            return mutant
    raise UnknownAcceleratorError(
        f"there is no mutant '{name}'", hint="python -m ds_plugin_sdk.conformance.mutants --list lists them"
    )
