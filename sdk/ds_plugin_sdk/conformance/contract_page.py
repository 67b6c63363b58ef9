"""The contract page, docs/contract.md, from the clauses of the checks: ``sdk conformance --contract`` prints it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ds_plugin_sdk.conformance import suite
from ds_plugin_sdk.conformance.check import Check
from ds_plugin_sdk.conformance.outcome import LEVELS, Level

_HEAD = """\
# The contract between a plugin, DeepSpeed and its users

Made by `sdk conformance --contract` from the checks; every clause is checked, and every check has a clause. A
clause keeps its number. "The accelerator" is the object of the plugin's class, "the device" is the hardware behind it.

Each clause is followed by its reason and by the check that tests it: `sdk conformance NAME -k CHECK`.
"""

_LEVELS: dict[Level, str] = {
    "runtime": "The accelerator's members: device, streams, events, memory, random numbers, manifest.",
    "ops": "Each op that the SDK describes, on this device: by the plugin's kernel where there is one.",
    "training": "Unmodified DeepSpeed on this device, against the same training on the CPU.",
    "distributed": "Several ranks: the collectives that DeepSpeed uses.",
    "features": "What a user of DeepSpeed switches on, each in a short run, against the same run on the host.",
    "deepspeed": "DeepSpeed's own unit tests, beside what DeepSpeed's CPU accelerator makes of them.",
}


def render() -> str:
    """The page, in Markdown."""
    checks = suite.checks()
    parts = [_level(level, [check for check in checks if check.level == level]) for level in LEVELS]
    return "\n".join([_HEAD, *filter(None, parts)])


def _level(level: Level, checks: Iterable[Check]) -> str:
    chapters = "\n".join(
        _chapter(number, list(group))
        for number, group in itertools.groupby(checks, key=lambda check: check.clause.number.partition(".")[0])
    )
    return f"## Level `{level}`\n\n{_LEVELS[level]}\n\n{chapters}" if chapters else ""


def _chapter(number: str, checks: Sequence[Check]) -> str:
    subjects = ", ".join(dict.fromkeys(check.name.split(".")[1].replace("_", " ") for check in checks))
    return "\n".join([f"### {number}: {subjects}\n", *map(_clause, checks)])


def _clause(check: Check) -> str:
    """One clause; links reach it by its number."""
    number = check.clause.number
    return (
        f'<a id="{number}"></a>**{number}** {check.clause.text}\n\n> {check.clause.reason} Checked by `{check.name}`.\n'
    )
