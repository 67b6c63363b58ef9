"""Two reports of one machine: which figures differ by more than their repetitions do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_plugin_sdk.bench.report import Report
from ds_plugin_sdk.errors import SdkError

FASTER, SLOWER, SAME = "faster", "slower", "within noise"
_SPEEDS = ("per_second", "gb_s")
_MACHINE = ("processor", "instructions", "cores")  # a new kernel of the system makes no other machine


@dataclass(frozen=True)
class Row:
    """One figure that both reports have.

    Attributes:
        benchmark: of `suite.BENCHMARKS`.
        case: what was measured: the row's text and whole numbers.
        figure: the name of its column.
        before: median.
        after: median.
        times: speed after in multiples of that before.
        lowest, highest: the same at the ends of both spreads.
        verdict: faster, slower, or within noise.
    """

    benchmark: str
    case: str
    figure: str
    before: float
    after: float
    times: float
    lowest: float
    highest: float
    verdict: str


def run(before: Report, after: Report, *, least: float = 0.05, any_machine: bool = False) -> list[Row]:
    """Compare all figures that were repeated and that both reports have.

    A figure is faster or slower if the spreads, the middle eight of ten repetitions, do not overlap, and the medians
    differ by more than `least`.

    Args:
        before: the older one.
        after: the newer one.
        least: difference of speeds that is worth a word: 0.05 is a twentieth.
        any_machine: compare those of two machines too.

    Raises:
        SdkError: the machines differ, or the reports have no figure in common.
    """
    differ = [name for name in _MACHINE if before.machine.get(name) != after.machine.get(name)]
    if differ and not any_machine:
        why = "; ".join(f"{name}: {before.machine.get(name)}, then {after.machine.get(name)}" for name in differ)
        raise SdkError("The reports are of two machines", why=why, hint="--any-machine compares them nonetheless")
    older, newer = (_figures(report) for report in (before, after))
    rows = [_row(key, older[key], newer[key], least) for key in newer if key in older]
    if not rows:
        raise SdkError("The reports have no figure in common", hint="they must have a benchmark in common")
    return rows


Key = tuple[str, str, str]
Figure = tuple[float, float, float]  # median, ends of its spread


def _figures(report: Report) -> dict[Key, Figure]:
    figures: dict[Key, Figure] = {}
    for benchmark, result in report.results.items():
        for row in result.rows:
            for figure, (low, high) in row["spread"].items() if "spread" in row else ():
                if low == high:  # measured once: nothing says how far it varies
                    continue
                key = (benchmark, case(row), figure)
                if key in figures:
                    raise SdkError(
                        "A report has two rows of one case",
                        why=f"benchmark {benchmark}: {key[1]}",
                        hint="measure it again with this version (sdk bench all --report), which tells them apart",
                    )
                figures[key] = row[figure], low, high
    return figures


def case(row: Mapping[str, Any]) -> str:
    """What a row measured: its text and whole numbers before the first figure."""
    said = []
    for value in row.values():
        if isinstance(value, float) or value is None:
            break
        said.append(str(value))
    return ", ".join(each for each in said if each)


def _row(key: Key, before: Figure, after: Figure, least: float) -> Row:
    # What is faster has the larger speed, or the smaller time.
    if key[2].endswith(_SPEEDS):
        times, lowest, highest = after[0] / before[0], after[1] / before[2], after[2] / before[1]
    else:
        times, lowest, highest = before[0] / after[0], before[1] / after[2], before[2] / after[1]
    verdict = SAME
    if lowest > 1 and times > 1 + least:
        verdict = FASTER
    elif highest < 1 and times < 1 / (1 + least):
        verdict = SLOWER
    return Row(*key, before[0], after[0], times, lowest, highest, verdict)
