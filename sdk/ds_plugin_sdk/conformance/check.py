"""What a check is: a plain function over a target, the clause that it tests, and the cases it runs with.

    @check(
        "runtime.rng.restore",
        Clause(
            "R4.2",
            "After `set_rng_state(state)` the device draws the numbers that it drew after `state` was taken.",
            reason="Activation checkpointing draws the same dropout masks when it recomputes.",
        ),
    )
    def restore(target: Target) -> None:
        ...
        expect_equal(first, again, "numbers drawn after the state was restored")

A check passes by returning. It fails by raising: `NonconformanceError` from the ``expect`` functions, or anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_plugin_sdk.conformance.outcome import LEVELS, Level, Verdict
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import SdkError

Parameters = Mapping[str, str]
CheckFunction = Callable[..., None]


@dataclass(frozen=True)
class Clause:
    """One numbered sentence of the contract.

    Attributes:
        number: a letter for the level (R, O, T, D), a chapter and a running number: ``R4.2``. Never used again for
            something else.
        text: what holds, in the words of a contract.
        reason: what DeepSpeed, or a user, does with it.
    """

    number: str
    text: str
    reason: str


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: ``<level>.<subject>.<what>``; stable.
        clause: what it tests.
        function: called with the target, and the case's parameters by name.
        cases: the parameters to run it with on a target, such as ``{"op": "adam_", "dtype": "bfloat16"}``; their values
            are part of the case's id, in this order.
        needs: says why a target need not hold the clause: a capability that it declares it does not have. None where
            it must.
        isolated: whether it may crash, hang or change its process, and so gets one of its own.
        timeout: seconds after which it counts as hanging.
    """

    name: str
    clause: Clause
    function: CheckFunction
    cases: Callable[[Target], Iterable[Parameters]]
    needs: Callable[[Target], str | None]
    isolated: bool
    timeout: float

    @property
    def level(self) -> Level:
        return next(level for level in LEVELS if self.name.startswith(f"{level}."))


@dataclass(frozen=True)
class Case:
    """A check with its parameters."""

    check: Check
    parameters: Parameters = field(default_factory=dict)

    @property
    def id(self) -> str:
        """``ops.accuracy/adam_/bfloat16``: stable, and what expectations and ``-k`` name."""
        return "/".join([self.check.name, *self.parameters.values()])

    def run(self, target: Target) -> None:
        self.check.function(target, **self.parameters)


class NonconformanceError(SdkError, AssertionError):
    """A clause does not hold. `what` says which values differ from what was expected."""


class ExcusedError(Exception):
    """A clause does not hold, or could not be tried, for a reason that is not the target's.

    Attributes:
        verdict: how the case ends.
        reason: why.
    """

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict: Verdict = verdict
        self.reason = reason


# What the running case tells beyond its verdict.
_told: dict[str, Any] = {}


def tell(**facts: Any) -> None:
    """Called by a check: facts for the report, which JSON can say."""
    _told.update(facts)


def take_told() -> dict[str, Any]:
    """What was told since the last call."""
    taken = dict(_told)
    _told.clear()
    return taken


_checks: dict[str, Check] = {}


def check(
    name: str,
    clause: Clause,
    *,
    cases: Callable[[Target], Iterable[Parameters]] = lambda target: ({},),
    needs: Callable[[Target], str | None] = lambda target: None,
    isolated: bool = False,
    timeout: float = 60.0,
) -> Callable[[CheckFunction], CheckFunction]:
    """Declare a check; arguments as the attributes of `Check`."""

    def declare(function: CheckFunction) -> CheckFunction:
        assert name not in _checks, f"two checks are named {name}"
        _checks[name] = Check(name, clause, function, cases, needs, isolated, timeout)
        return function

    return declare


def declared() -> tuple[Check, ...]:
    """The checks of all modules imported so far, in the order of levels and clauses."""
    return tuple(
        sorted(_checks.values(), key=lambda check: (LEVELS.index(check.level), clause_order(check.clause.number)))
    )


def clause_order(number: str) -> tuple[int, ...]:
    """Sorts the numbers of clauses within a level: ``R4.10`` after ``R4.2``."""
    return tuple(int(part) for part in number[1:].split("."))


def expect(holds: bool, what: str, *, why: str = "", hint: str = "") -> None:
    """Fail unless `holds`; `what` says what was seen."""
    if not holds:
        raise NonconformanceError(what, why=why, hint=hint)


def expect_equal(actual: Any, expected: Any, what: str, *, hint: str = "") -> None:
    """Fail unless two values, which are no tensors, are equal."""
    expect(actual == expected, f"{what}: {actual!r}", why=f"expected {expected!r}", hint=hint)
