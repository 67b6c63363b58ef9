"""Seeded defects: the proof that each check sees what it is there to see. ``make mutants`` runs them.

The modules of this package declare them; `mutants.mutant` says how. Each mutant is an attribute of this package, and
so a target of the conformance suite, in every process that can import the package:

    PYTHONPATH=tests sdk conformance mutants:adam.no_bias_correction
"""

from __future__ import annotations

import importlib
import pkgutil

from mutants.mutant import Mutant, declared

__all__ = ["Mutant", "all_mutants"]

# The modules that declare no mutants.
_MACHINERY = frozenset({"__main__", "hunt", "mutant", "simulated"})


def all_mutants() -> tuple[Mutant, ...]:
    """Every mutant, in the order of levels and clauses."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _MACHINERY:
            importlib.import_module(f"{__name__}.{module.name}")
    return declared()


def __getattr__(name: str) -> Mutant:
    """The mutant of a name, which has a dot in it: no module or function of this package has."""
    if "." not in name:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    for mutant in all_mutants():
        if mutant.name == name:
            return mutant
    raise AttributeError(f"there is no mutant '{name}'; make mutants MUTANTS=--list lists them")
