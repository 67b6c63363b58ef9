"""From reports of the level ``deepspeed``: conformance/deepspeed/known.json and the table of docs/deepspeed-tests.md.

    python tools/deepspeed_tests.py CPU.json OWN.json

CPU.json is the report of ``sdk conformance cpu``, OWN.json that of DeepSpeed's own CPU accelerator: ``in_tree:CPU``
with tests/conformance on PYTHONPATH. What only one of them has is kept as it is known already.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ds_plugin_sdk.conformance.outcome import Report

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ROOT / "sdk" / "ds_plugin_sdk" / "conformance" / "deepspeed" / "known.json"
PAGE = ROOT / "docs" / "deepspeed-tests.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"

FAILED = ("failed", "crashed", "timed out")


def ends(report: Report) -> dict[str, dict[str, list[str]]]:
    """The tests of each file by their ends."""
    files: dict[str, dict[str, list[str]]] = {}
    for outcome in report.outcomes:
        if outcome.item.level == "deepspeed" and "tests" in outcome.facts:
            found = files.setdefault(outcome.item.parameters["file"], {})
            for case, (end, *_) in outcome.facts["tests"].items():
                found.setdefault(end, []).append(case)
    return files


def called(report: Report) -> dict[str, int]:
    """How many tests of each file passed and called an op of the SDK."""
    return {
        outcome.item.parameters["file"]: sum(
            end == "passed" and calls > 0 for end, _, calls in outcome.facts["tests"].values()
        )
        for outcome in report.outcomes
        if outcome.item.level == "deepspeed" and "tests" in outcome.facts
    }


def gated(file: dict[str, list[str]] | None) -> bool:
    """Whether none of its tests passes."""
    return file is not None and not file.get("passed")


def counts(file: dict[str, list[str]] | None) -> str:
    """``passed / skipped / failed``, and whether there was no time for the rest."""
    if file is None:
        return "not run"
    counted = Counter({end: len(cases) for end, cases in file.items()})
    ends = f"{counted['passed']} / {counted['skipped']} / {sum(counted[end] for end in FAILED)}"
    return f"{ends}, not to its end" if counted["not run"] else ends


def table(known: dict[str, Any]) -> str:
    ours, own = known["accelerators"]["cpu"], known["accelerators"]["deepspeed"]
    calls = known["called"]
    rows = [
        [f"`{file.removeprefix('unit/')}`", counts(ours.get(file)), str(calls.get(file, "")), counts(own.get(file))]
        for file in sorted({*ours, *own})
    ]
    without = [file for file in ours if gated(own.get(file))]
    passed = sum(len(ours[file].get("passed", ())) for file in without)
    head = [["file below `tests/unit`", "plugin", "with a call of ours", "DeepSpeed's own"], ["---"] * 4]
    seen = sum(calls.get(file, 0) for file in without)
    total = (
        f"In {len(without)} of these files no test passes on DeepSpeed's own accelerator, mostly for lack of their "
        f"ops. On the plugin {passed} of their tests pass, {seen} of them with a call of an op of the SDK."
    )
    every = Counter(end for file in ours.values() for end, cases in file.items() for _ in cases)
    whole = (
        f"All {len(ours)} files on the plugin: {every['passed']} passed, {every['skipped']} skipped, "
        f"{sum(every[end] for end in FAILED)} failed."
    )
    lines = [f"| {' | '.join(row)} |" for row in [*head, *rows]]
    return "\n".join([*lines, "", whole, total]) + "\n"


def main() -> None:
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    for name, path in zip(("cpu", "deepspeed"), sys.argv[1:], strict=True):
        report = Report.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        known["accelerators"][name].update(ends(report))
        if name == "cpu":
            known["called"].update(called(report))
    KNOWN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(known) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
