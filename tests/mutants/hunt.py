"""Whether each mutant is found, by the check of the clause that it breaks, and whether each check finds one.

A mutant is killed by a case that fails on it and passes on the target without it. Only the cases of the mutant's own
clause are run, and only until one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ds_plugin_sdk.conformance.outcome import Item, Outcome
from ds_plugin_sdk.conformance.run import Runner
from ds_plugin_sdk.conformance.selection import Selection
from ds_plugin_sdk.errors import ConformanceError
from mutants.mutant import Mutant


@dataclass(frozen=True)
class Hunt:
    """What came of a mutant.

    Attributes:
        mutant: the mutant.
        killer: the case that failed on it; None if it survived.
        survived: why it did, or why its death proves nothing.
    """

    mutant: Mutant
    killer: Outcome | None = None
    survived: str = ""

    @property
    def killed(self) -> bool:
        return self.killer is not None and not self.survived

    @property
    def check(self) -> str:
        """The check that killed it."""
        return self.killer.item.check if self.killer is not None else ""


def hunt(mutants: Sequence[Mutant], jobs: int, tell: Callable[[Hunt], None]) -> list[Hunt]:
    """Try each mutant, `jobs` at a time, and `tell` of each at its end; then its killers without a defect."""
    found: list[Hunt] = []
    with ThreadPoolExecutor(jobs) as pool:
        for each in pool.map(_hunt, mutants):
            tell(each)
            found.append(each)
        targets = dict.fromkeys(each.mutant.target for each in found)
        unchanged = dict(zip(targets, pool.map(lambda target: _failing(target, found), targets), strict=True))
    return [_proven(each, unchanged[each.mutant.target]) for each in found]


def idle(checks: Iterable[str], hunts: Sequence[Hunt]) -> list[str]:
    """The checks that killed no mutant."""
    busy = {each.check for each in hunts if each.killed}
    return [check for check in checks if check not in busy]


def _hunt(mutant: Mutant) -> Hunt:
    with Runner(mutant.target_name, ahead=False) as runner:
        try:
            items = list(_cases(mutant, runner.items()))
        except ConformanceError as error:
            return Hunt(mutant, survived=f"it cannot be tried: {error}")
        ends = [f"clause {mutant.clause} has no case for it"] if not items else []
        for item in items:
            outcome = runner.run(item)
            if outcome.failed:
                return Hunt(mutant, outcome)
            ends.append(f"{item.id} {outcome.verdict}" + (f": {outcome.reason}" if outcome.reason else ""))
    return Hunt(mutant, survived="; ".join(dict.fromkeys(ends)))


def _cases(mutant: Mutant, items: Sequence[Item]) -> Iterator[Item]:
    selected = Selection(patterns=[mutant.only] if mutant.only else []).of(items)
    return (item for item in selected if item.clause == mutant.clause)


def _failing(target: str, hunts: Iterable[Hunt]) -> dict[str, str]:
    """Of the cases that killed mutants of a target, those that fail without any, and what they say."""
    wanted = {each.killer.item.id for each in hunts if each.killer is not None and each.mutant.target == target}
    with Runner(target) as runner:
        outcomes = [runner.run(item) for item in runner.items() if item.id in wanted]
    return {each.item.id: each.failure.what for each in outcomes if each.failure is not None}


def _proven(each: Hunt, failing: dict[str, str]) -> Hunt:
    if each.killer is None or each.killer.item.id not in failing:
        return each
    what = failing[each.killer.item.id]
    return Hunt(each.mutant, each.killer, survived=f"{each.killer.item.id} fails without it too: {what}")
