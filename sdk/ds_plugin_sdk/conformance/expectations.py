"""``conformance.toml``: the cases that are expected to fail, each with the reason why that is in order.

    [[expected_failure]]
    check = "ops.accuracy/adam_/float16"     # a case's id; * stands for any text
    reason = "ZAP-117: the unit flushes subnormal numbers to zero"
    until = "2027-01-01"                     # optional: from this day on the failure counts again

An entry that names no case, one whose day has come, and a case that passes nevertheless are errors: a list of excuses
that is never read grows.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_plugin_sdk import registry
from ds_plugin_sdk.conformance.outcome import Item, Outcome, Verdict
from ds_plugin_sdk.conformance.selection import matches
from ds_plugin_sdk.errors import DOCUMENTATION, ConformanceError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "conformance.toml"


@dataclass(frozen=True)
class Expectation:
    """One entry.

    Attributes:
        check: a case's id, in which ``*`` stands for any text.
        reason: why the failure is in order.
        until: the day from which on it is not.
    """

    check: str
    reason: str
    until: datetime.date | None = None


@dataclass(frozen=True)
class Expectations:
    """The entries of one file."""

    entries: tuple[Expectation, ...] = ()
    path: Path | None = None
    today: datetime.date = dataclasses.field(default_factory=datetime.date.today)

    @staticmethod
    def read(path: Path) -> Expectations:
        """The entries of a file.

        Raises:
            ConformanceError: the file cannot be read, or says what it cannot say.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConformanceError("the expectations cannot be read", why=f"{path}: {error}") from error
        unknown = set(data) - {"expected_failure"}
        if unknown:
            raise _wrong(path, f"it has a table '{min(unknown)}'; the only one is [[expected_failure]]")
        return Expectations(tuple(_entry(path, each) for each in data.get("expected_failure", [])), path)

    @staticmethod
    def of(target: str, given: Path | None = None) -> Expectations:
        """Those of the file given, else of the plugin's project, else of the current folder; else none."""
        if given is not None:
            return Expectations.read(given)
        folders = [folder for folder in (_project(target), Path.cwd()) if folder is not None]
        found = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
        return Expectations() if found is None else Expectations.read(found)

    def problems(self, items: Sequence[Item]) -> list[str]:
        """What is wrong with the entries, given all cases of the target."""
        unknown = [entry for entry in self.entries if not any(matches(entry.check, item.id) for item in items)]
        return [
            *(
                f"{self.path}: no case is called '{entry.check}' (sdk conformance NAME --list has the ids)"
                for entry in unknown
            ),
            *(f"{self.path}: '{entry.check}' was expected to fail until {entry.until}" for entry in self._expired()),
        ]

    def judge(self, outcome: Outcome) -> Outcome:
        """An outcome in the light of the entry for its case, if there is one."""
        entry = next((entry for entry in self.entries if matches(entry.check, outcome.item.id)), None)
        if entry is None or entry in self._expired() or outcome.verdict in ("skipped", "DeepSpeed's limit"):
            return outcome
        verdict: Verdict = "unexpected pass" if outcome.verdict == "passed" else "expected failure"
        return dataclasses.replace(outcome, verdict=verdict, reason=entry.reason)

    def _expired(self) -> list[Expectation]:
        return [entry for entry in self.entries if entry.until is not None and entry.until <= self.today]


def _entry(path: Path, data: Any) -> Expectation:
    if not isinstance(data, dict) or not {"check", "reason"} <= set(data) <= {"check", "reason", "until"}:
        raise _wrong(path, f"an entry has check, reason and, if you like, until; this one is {data}")
    check, reason, until = data["check"], data["reason"], data.get("until")
    if not isinstance(reason, str) or not reason.strip():
        raise _wrong(path, f"the entry for '{check}' gives no reason")
    if not isinstance(check, str) or not check.strip("* "):
        raise _wrong(path, f"an entry names a case or a group of cases, not {check!r}")
    try:
        day = datetime.date.fromisoformat(str(until)) if until is not None else None
    except ValueError as error:
        raise _wrong(path, f"the entry for '{check}' ends at {until!r}, which is no day such as 2027-01-31") from error
    return Expectation(check, reason, day)


def _wrong(path: Path, why: str) -> ConformanceError:
    return ConformanceError(
        "the expectations are not as they must be",
        why=f"{path}: {why}",
        hint=f"{DOCUMENTATION}/conformance.md describes the file",
    )


def _project(target: str) -> Path | None:
    """The folder that holds a plugin's package, where that is a checkout; None where nothing is found."""
    name, _, _ = target.partition("@")
    module = name.partition(":")[0]
    if ":" not in name:
        candidates = registry.scan().get(name)
        if not candidates:
            return None
        module = candidates[0].entry_point.module
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve().parent.parent if spec is not None and spec.origin is not None else None
