"""Seeded defects: the proof that each check sees what it is there to see. ``make mutants`` runs them.

The modules of this package declare them; `ds_plugin_sdk.conformance.mutants.mutant` says how. A target with one is
named ``<target>@<mutant>``, everywhere a target is named:

    sdk conformance cpu@adam.no_bias_correction
"""

from __future__ import annotations

import importlib
import pkgutil

from ds_plugin_sdk.conformance.mutants.mutant import Mutant, declared
from ds_plugin_sdk.errors import UnknownAcceleratorError

__all__ = ["Mutant", "all_mutants", "find"]

# The modules that declare no mutants.
_MACHINERY = frozenset({"__main__", "hunt", "mutant", "simulated"})


def all_mutants() -> tuple[Mutant, ...]:
    """Every mutant, in the order of levels and clauses."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _MACHINERY:
            importlib.import_module(f"{__name__}.{module.name}")
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
