"""The badge of a report."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from ds_plugin_sdk.conformance.outcome import Item, Outcome, Report, Verdict
from ds_plugin_sdk.conformance.reports import badge


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
