"""The tables of a report, as rows of text: terminal and HTML show the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ds_plugin_sdk.conformance.outcome import BROKEN, HOLDS, NOTHING_RUN, Outcome, Report


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def matrix(report: Report) -> Table:
    """How many cases ended how, and how long they took: by level and by what they are about, and of each level."""
    ends = list(report.counts)
    groups: dict[tuple[str, str], list[Outcome]] = {}
    levels: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in report.outcomes:
        groups.setdefault((outcome.item.level, outcome.item.subject), []).append(outcome)
        levels.setdefault((outcome.item.level, "all"), []).append(outcome)
    parts = {**groups, **levels} if len(levels) > 1 else groups
    rows = [[*key, *_counted(part, ends), _seconds(part)] for key, part in parts.items()]
    rows.append(["", "all", *_counted(report.outcomes, ends), f"{report.seconds:.1f}"])
    return Table(f"Conformance of {report.target}", ["level", "subject", *ends, "seconds"], rows)


def skips(report: Report) -> Table:
    """What was skipped, by the declaration that allows it."""
    groups: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        if outcome.verdict == "skipped":
            groups.setdefault(outcome.reason, []).append(outcome.item.id)
    return Table("Skipped", ["by the declaration", "cases"], [[why, ", ".join(ids)] for why, ids in groups.items()])


def expected(report: Report) -> Table:
    """The failures that the expectations excuse."""
    excused = [outcome for outcome in report.outcomes if outcome.verdict == "expected failure"]
    rows = [[outcome.item.id, outcome.item.clause, outcome.reason] for outcome in excused]
    return Table("Expected failures", ["case", "clause", "reason"], rows)


def limits(report: Report) -> Table:
    """What DeepSpeed itself does not do on this device, and where it says so."""
    found = [outcome for outcome in report.outcomes if outcome.verdict == "DeepSpeed's limit"]
    return Table("DeepSpeed's limits", ["case", "place"], [[each.item.id, each.reason] for each in found])


def slowest(report: Report, count: int = 5) -> Table:
    """The cases that took longest."""
    ordered = sorted(report.outcomes, key=lambda outcome: -outcome.seconds)[:count]
    return Table("Slowest", ["case", "seconds"], [[each.item.id, f"{each.seconds:.1f}"] for each in ordered])


def ops(report: Report) -> Table:
    """Where each op comes from."""
    rows = [[str(op[name]) for name in ("name", "origin", "provider", "reason")] for op in _ops(report)]
    return Table("Ops", ["op", "from", "provider", "reason"], rows)


def environment(report: Report) -> Table:
    """Versions, machine and what the plugin declares."""
    facts = report.environment
    rows = [
        *([name, str(value)] for name, value in facts.get("versions", {}).items()),
        *([name, str(value)] for name, value in facts.get("machine", {}).items()),
        *([name, str(facts[name])] for name in ("accelerator", "device") if name in facts),
        ["started", report.started],
    ]
    return Table("Environment", ["what", "value"], rows)


def declared(report: Report) -> Table:
    """The limits that the plugin declares of itself."""
    facts = report.environment
    rows = [["dtypes", ", ".join(facts.get("dtypes", []))]]
    rows += [[name, str(value)] for name, value in facts.get("declared", {}).items()]
    return Table("Declared", ["member", "value"], rows)


def total(report: Report) -> str:
    """One line: the counts, the time, the judgement."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.counts.items()) or "no case ran"
    judgement = {
        HOLDS: "all that was checked holds",
        BROKEN: "does not conform",
        NOTHING_RUN: "nothing was checked, which is no success",
    }[report.status]
    return f"{report.target}: {counts} in {report.seconds:.0f} s: {judgement}"


def _counted(outcomes: Sequence[Outcome], ends: Sequence[str]) -> list[str]:
    counted = Counter(str(outcome.verdict) for outcome in outcomes)
    return [str(counted[end] or "") for end in ends]


def _seconds(outcomes: Sequence[Outcome]) -> str:
    return f"{sum(outcome.seconds for outcome in outcomes):.1f}"


def _ops(report: Report) -> list[dict[str, str]]:
    found: list[dict[str, str]] = report.environment.get("ops", [])
    return found
