"""What reports show: the badge, and the table of the terminal and the page."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from ds_plugin_sdk.conformance.outcome import Item, Outcome, Report, Verdict
from ds_plugin_sdk.conformance.reports import badge, summary


def report_of(*verdicts: Verdict) -> Report:
    item = Item("runtime.x", "runtime.x", "runtime", {}, "R1.1", "It holds.", "For a reason.")
    return Report("zap", outcomes=[Outcome(item, verdict) for verdict in verdicts])


@pytest.mark.parametrize(
    ("verdicts", "message", "colour"),
    [
        (("passed", "passed", "skipped"), "2 passed", "#116329"),
        (("passed", "expected failure"), "1 passed, 1 excused", "#116329"),
        (("passed", "failed", "crashed"), "1 passed, 2 failed", "#b42318"),
        (("skipped",), "nothing checked", "#57606a"),
    ],
)
def test_it_says_what_holds(verdicts: tuple[Verdict, ...], message: str, colour: str) -> None:
    text = badge.render(report_of(*verdicts))
    svg = ElementTree.fromstring(text)
    assert svg.get("aria-label") == f"DeepSpeed conformance: {message}"
    assert f'fill="{colour}"' in text


def test_each_level_has_its_sum_where_there_are_several() -> None:
    one, other = (Item(f"{level}.x", f"{level}.x", level, {}, "R1.1", "", "") for level in ("runtime", "training"))
    outcomes = [Outcome(one, "passed", 1.5), Outcome(one, "failed", 1.0), Outcome(other, "passed", 4.0)]
    report = Report("zap", outcomes=outcomes, seconds=7.0)
    rows = [*summary.matrix(report).rows]
    assert rows[2:] == [
        ["runtime", "all", "1", "1", "2.5"],
        ["training", "all", "1", "", "4.0"],
        ["", "all", "2", "1", "7.0"],
    ]
    alone = Report("zap", outcomes=outcomes[:2], seconds=7.0)
    assert [row[:2] for row in summary.matrix(alone).rows] == [["runtime", "x"], ["", "all"]]
