"""Level ``deepspeed``: DeepSpeed's own unit tests on the target, beside what DeepSpeed's CPU accelerator makes of them.

    sdk conformance zap --level deepspeed --deepspeed-tests DeepSpeed/tests

One case for each file. A test that passes on DeepSpeed's CPU accelerator must pass on the target; so must one that is
skipped there, for that accelerator lacks most ops. `known` has what is known of each test.
"""

from __future__ import annotations

import atexit
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ds_plugin_sdk.conformance.check import Clause, ExcusedError, Parameters, check, expect, tell
from ds_plugin_sdk.conformance.deepspeed.known import Known
from ds_plugin_sdk.conformance.deepspeed.session import Result, Session
from ds_plugin_sdk.conformance.patience import allowed
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.settings import settings

# For a file; some have hundreds of tests.
_FILE_SECONDS = 1800.0

_BAD = frozenset({"failed", "crashed", "timed out"})

# The worker's session, by target; it ends with the worker.
_sessions: dict[str, Session] = {}


def _needs_tests(target: Target) -> str | None:
    folder = settings.deepspeed_tests
    if folder is None:
        return "DeepSpeed's tests are not in its wheel: --deepspeed-tests names the folder 'tests' of a clone"
    return None


def _files(target: Target) -> Iterable[Parameters]:
    """Each file of unit tests; first those that ask for ops, for there devices differ most."""
    folder = settings.deepspeed_tests
    assert folder is not None
    found = sorted((folder / "unit").rglob("test_*.py"))
    expect(bool(found), f"there are no unit tests in {folder}", hint="name the folder 'tests' of DeepSpeed's clone")
    ordered = sorted(found, key=lambda file: ("ops" not in file.parts, not _asks_for_ops(file)))
    return [{"file": file.relative_to(folder).as_posix()} for file in ordered]


def _asks_for_ops(file: Path) -> bool:
    text = file.read_text(encoding="utf-8", errors="replace")
    return re.search(r"op_builder|__compatible_ops__|deepspeed\.ops", text) is not None


def _session(target: Target, folder: Path) -> Session:
    if target.name not in _sessions:
        session = _sessions[target.name] = Session(target, folder)
        atexit.register(session.close)
    return _sessions[target.name]


@check(
    "deepspeed.tests",
    Clause(
        "U1.1",
        "DeepSpeed's unit tests pass, but for those that fail on DeepSpeed's own CPU accelerator, if they do not pass "
        "on ds-plugin-cpu, and those that are known to contradict the release.",
        reason="They say what DeepSpeed's authors expect of every device.",
    ),
    cases=_files,
    needs=_needs_tests,
    timeout=2 * _FILE_SECONDS,
)
def tests(target: Target, file: str) -> None:
    assert settings.deepspeed_tests is not None
    results = _session(target, settings.deepspeed_tests).run(file, allowed(_FILE_SECONDS))
    tell(tests={case: dataclasses.astuple(result) for case, result in results.items()})
    known = Known.read()
    bad = {case: result for case, result in results.items() if result.outcome in _BAD}
    unknown = {case: result for case, result in bad.items() if not known.excuse(file, case)}
    ends = ", ".join(f"{count} {end}" for end, count in Counter(each.outcome for each in results.values()).items())
    first = next(iter(unknown.items()), None)
    expect(
        not unknown,
        f"{', '.join(unknown)}: of {len(results)} tests {ends}",
        why=f"{first[0]}: {first[1].why}" if first else "",
    )
    if all(result.outcome in {"skipped", "not run"} for result in results.values()):
        raise ExcusedError("skipped", _reasons(results.values()) or "the file has no tests")
    if len(bad) == len(results):
        raise ExcusedError("skipped", "; ".join({known.excuse(file, case) or "" for case in bad}))


def _reasons(results: Iterable[Result]) -> str:
    """Why tests skipped themselves."""
    return "; ".join(dict.fromkeys(result.why.strip() for result in results))
