"""What the parent knows of a case, and what came of it. JSON is the form in which it travels and is kept."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["runtime", "ops", "training", "distributed", "features", "deepspeed"]
LEVELS: tuple[Level, ...] = ("runtime", "ops", "training", "distributed", "features", "deepspeed")

Verdict = Literal[
    "passed",
    "failed",
    "crashed",
    "timed out",
    "skipped",
    "expected failure",
    "unexpected pass",
    "DeepSpeed's limit",
]

# In the order in which reports name them.
VERDICTS: tuple[Verdict, ...] = (
    "passed",
    "failed",
    "crashed",
    "timed out",
    "unexpected pass",
    "expected failure",
    "DeepSpeed's limit",
    "skipped",
)
FAILURES: frozenset[Verdict] = frozenset({"failed", "crashed", "timed out", "unexpected pass"})

# Exit statuses of `sdk conformance`.
HOLDS, BROKEN, UNUSABLE, NOTHING_RUN = 0, 1, 2, 3


@dataclass(frozen=True)
class Failure:
    """Why a case failed.

    Attributes:
        what: what was seen: the values that differ, or the error.
        why: what was expected, or what caused it.
        hint: what to do next.
        where: ``file:line in function``, of the check.
        traceback: Python's, from the check on; empty where `where` says it all.
        output: the last lines that the worker printed.
    """

    what: str
    why: str = ""
    hint: str = ""
    where: str = ""
    traceback: str = ""
    output: str = ""


@dataclass(frozen=True)
class Item:
    """A case, as the worker described it.

    Attributes:
        id: of the case.
        check: name of its check.
        level: of the check.
        parameters: of the case.
        clause, text, reason: number, text and reason of the clause.
        isolated: whether it gets a process of its own.
        timeout: seconds after which it counts as hanging.
        skip: the declaration by which the target need not hold the clause, if there is one.
        broken: why the check could not say what its cases are.
    """

    id: str
    check: str
    level: str
    parameters: Mapping[str, str]
    clause: str
    text: str
    reason: str
    isolated: bool = False
    timeout: float = 60.0
    skip: str = ""
    broken: Failure | None = None

    @property
    def subject(self) -> str:
        """What the case is about: an op, the folder of a file, or the second word of the check's name."""
        folder = self.parameters.get("file", "").rpartition("/")[0]
        return self.parameters.get("op") or folder or self.check.split(".")[1]


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        item: the case.
        verdict: its end.
        seconds: wall time.
        failure: where it failed, expected or not.
        reason: why it was skipped, why its failure is expected, or where DeepSpeed forbids it.
        facts: what the check told beyond that.
    """

    item: Item
    verdict: Verdict
    seconds: float = 0.0
    failure: Failure | None = None
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether it counts as a failure."""
        return self.verdict in FAILURES


@dataclass
class Report:
    """A run of the suite.

    Attributes:
        target: what was checked.
        environment: versions, device, what the target declares: as `worker` gathers it.
        outcomes: one for each case, in the order in which they ran.
        problems: what is wrong with the expectations: unknown ids, expired entries.
        seconds: wall time of the run.
        started: when, ISO 8601, UTC.
    """

    target: str
    environment: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    started: str = ""

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many cases ended how; those that none did are left out."""
        counted = Counter(outcome.verdict for outcome in self.outcomes)
        return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failed]

    @property
    def status(self) -> int:
        """The exit status. A run in which every case was skipped has checked nothing."""
        if self.failures or self.problems:
            return BROKEN
        return HOLDS if any(outcome.verdict != "skipped" for outcome in self.outcomes) else NOTHING_RUN

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"format": 1, "status": self.status, "counts": self.counts, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`."""
        fields = {each.name: data[each.name] for each in dataclasses.fields(Report)}
        return Report(**{**fields, "outcomes": [outcome_from_dict(each) for each in data["outcomes"]]})


def item_from_dict(data: Mapping[str, Any]) -> Item:
    """From JSON."""
    return Item(**{**data, "broken": _failure_from_dict(data.get("broken"))})


def outcome_from_dict(data: Mapping[str, Any]) -> Outcome:
    """From JSON."""
    failure = _failure_from_dict(data.get("failure"))
    return Outcome(**{**data, "item": item_from_dict(data["item"]), "failure": failure})


def _failure_from_dict(data: Mapping[str, Any] | None) -> Failure | None:
    return None if data is None else Failure(**data)


def command(target: str, case: str) -> str:
    """The command that runs one case alone."""
    return f"sdk conformance {shlex.quote(target)} -k {shlex.quote(case)}"


def explain(outcome: Outcome, target: str) -> str:
    """A failure in full: clause, what differed, why, what to do, where, and the command that runs it again."""
    item, failure = outcome.item, outcome.failure or Failure("")
    parts = [
        (f"{item.clause}", item.text),
        ("because", item.reason),
        ("found", failure.what),
        ("why", failure.why),
        ("to do", failure.hint),
        ("expected", outcome.reason),
        ("check", failure.where),
        ("trace", failure.traceback),
        ("output", failure.output),
        ("again", command(target, item.id)),
    ]
    head = f"{outcome.verdict}: {item.id}"
    return "\n".join([head, *(_paragraph(name, text) for name, text in parts if text)])


def _paragraph(name: str, text: str) -> str:
    """A name and its text, whose further lines stand under the first."""
    first, *rest = text.rstrip().splitlines()
    return "\n".join([f"  {name:<8} {first}", *(f"           {line}".rstrip() for line in rest)])
