"""Whether each mutant is found, by the check of the clause that it breaks, and whether each check finds one.

A mutant is killed by a case that fails on it and passes on the target without it. Only the cases of the mutant's own
clause are run, and only until one fails.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ds_plugin_sdk.conformance.outcome import Outcome, outcome_from_dict
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
        seconds: how long it was tried.
    """

    mutant: Mutant
    killer: Outcome | None = None
    survived: str = ""
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.killer is not None and not self.survived

    @property
    def check(self) -> str:
        """The check that killed it."""
        return self.killer.item.check if self.killer is not None else ""


def hunt(
    mutants: Sequence[Mutant], jobs: int, tell: Callable[[Hunt], None], ended: Mapping[str, Hunt] | None = None
) -> list[Hunt]:
    """Try each mutant, `jobs` at a time, and `tell` of each at its end; then its killers without a defect.

    Args:
        mutants: what to try.
        jobs: how many at a time.
        tell: called with each as it ends.
        ended: what came of mutants that were tried before, by name; these are not tried again.
    """
    ended = ended or {}
    found = [ended[each.name] for each in mutants if each.name in ended]
    with ThreadPoolExecutor(jobs) as pool:
        for each in pool.map(_hunt, [each for each in mutants if each.name not in ended]):
            tell(each)
            found.append(each)
        targets = dict.fromkeys(each.mutant.target for each in found)
        unchanged = dict(zip(targets, pool.map(lambda target: _failing(target, found), targets), strict=True))
    return [_proven(each, unchanged[each.mutant.target]) for each in found]


def keep(each: Hunt, file: Path) -> None:
    """Add a line to the file, for `kept`."""
    killer = dataclasses.asdict(each.killer) if each.killer is not None else None
    line = {"mutant": each.mutant.name, "killer": killer, "survived": each.survived, "seconds": each.seconds}
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def kept(file: Path, mutants: Iterable[Mutant]) -> dict[str, Hunt]:
    """What the file has of the mutants that were killed, by name; the others are to be tried again."""
    named = {each.name: each for each in mutants}
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {
        line["mutant"]: Hunt(named[line["mutant"]], outcome_from_dict(line["killer"]), seconds=line["seconds"])
        for line in lines
        if line["killer"] is not None and line["mutant"] in named
    }


def idle(checks: Iterable[str], hunts: Sequence[Hunt]) -> list[str]:
    """The checks that killed no mutant."""
    busy = {each.check for each in hunts if each.killed}
    return [check for check in checks if check not in busy]


def _hunt(mutant: Mutant) -> Hunt:
    start = time.monotonic()
    return dataclasses.replace(_tried(mutant), seconds=time.monotonic() - start)


def _tried(mutant: Mutant) -> Hunt:
    with Runner(mutant.target_name, ahead=False) as runner:
        try:
            items = Selection(patterns=[mutant.only] if mutant.only else []).of(runner.items(mutant.clause))
        except ConformanceError as error:
            return Hunt(mutant, survived=f"it cannot be tried: {error}")
        ends = [f"clause {mutant.clause} has no case for it"] if not items else []
        for item in items:
            outcome = runner.run(item)
            if outcome.failed:
                return Hunt(mutant, outcome)
            ends.append(f"{item.id} {outcome.verdict}" + (f": {outcome.reason}" if outcome.reason else ""))
    return Hunt(mutant, survived="; ".join(dict.fromkeys(ends)))


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
    return dataclasses.replace(each, survived=f"{each.killer.item.id} fails without it too: {what}")
