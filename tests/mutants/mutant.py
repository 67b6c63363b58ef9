"""What a mutant is: one deliberate defect of a target, and the clause whose check must find it.

    @mutant("rng.state_ignored", "R4.2", "runtime")
    def state_ignored(target: Target) -> Target:
        '''`set_rng_state` does nothing.'''
        return override(target, set_rng_state=lambda self, state, device_index=None: None)

A mutant is a target by itself, ``mutants:rng.state_ignored``: so it is found by its name, as any other target is, in
each process that a check starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_plugin_sdk.conformance.check import clause_order
from ds_plugin_sdk.conformance.outcome import LEVELS, Level
from ds_plugin_sdk.conformance.target import Target

# An accelerator on the simulated device: for defects of streams, events and device memory.
SIMULATED = "mutants.simulated:SimulatedAccelerator"
# The same as an installed plugin.
INSTALLED = "mutants.simulated:installed_plugin"

Install = Callable[[Target], Target]


@dataclass(frozen=True)
class Mutant:
    """One deliberate defect.

    Attributes:
        name: short and stable.
        description: what is wrong.
        clause: number of the clause that is broken, and whose check must say so.
        level: of that check.
        target: what the defect is put into.
        only: which cases of the check to try: as ``sdk conformance -k``. Empty: all, until one fails.
        install: puts the defect into a target of this process, and returns what is to be used in its place.
    """

    name: str
    description: str
    clause: str
    level: Level
    target: str
    only: str
    install: Install

    @property
    def target_name(self) -> str:
        """Finds the target with the defect: the mutant as an attribute of the top-level module that declares it."""
        return f"{self.install.__module__.partition('.')[0]}:{self.name}"

    def __call__(self) -> Target:
        """The target with the defect, in this process."""
        return dataclasses.replace(self.install(Target.find(self.target)), one_task_a_run=True)


_mutants: dict[str, Mutant] = {}


def mutant(
    name: str, clause: str, level: Level, *, target: str = "cpu", only: str = ""
) -> Callable[[Install], Install]:
    """Declare a mutant; arguments as the attributes of `Mutant`. The function's docstring describes it."""

    def declare(function: Install) -> Install:
        assert "." in name, f"the name of mutant {name} is not <what>.<defect>"
        assert name not in _mutants, f"two mutants are named {name}"
        assert function.__doc__, f"mutant {name} says nowhere what is wrong with it"
        description = function.__doc__.strip().splitlines()[0]
        _mutants[name] = Mutant(name, description, clause, level, target, only, function)
        return function

    return declare


def declared() -> tuple[Mutant, ...]:
    """The mutants of all modules imported so far."""
    return tuple(
        sorted(_mutants.values(), key=lambda each: (LEVELS.index(each.level), clause_order(each.clause), each.name))
    )


def override(target: Target, **members: Any) -> Target:
    """The target with some members of its accelerator replaced, in a class derived from the accelerator's.

    A function is a method: its first argument is the accelerator.
    """
    cls = type(target.accelerator)
    accelerator = type(cls.__name__, (cls,), {"__module__": cls.__module__, **members})()
    return dataclasses.replace(target, accelerator=accelerator)
