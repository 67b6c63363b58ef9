"""The process in which checks run: ``python -m ds_plugin_sdk.conformance.worker TARGET FD``.

It loads the target, then answers requests, JSON over the pipe `FD`, until that is closed. A check may crash it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from ds_plugin_sdk.conformance import environment, fuzz, patience, programs, suite
from ds_plugin_sdk.conformance.check import Case, Check, ExcusedError, NonconformanceError, take_told
from ds_plugin_sdk.conformance.outcome import Failure, Item, Verdict
from ds_plugin_sdk.conformance.process import pipe_to_parent
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import SdkError

_OURS = tuple(f"{os.sep}conformance{os.sep}{name}" for name in ("worker.py", "check.py"))


def main() -> None:
    """Load the target and answer, until the parent closes the pipe."""
    faulthandler.enable()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has gone
        _serve(sys.argv[1], pipe_to_parent())


def _serve(name: str, connection: Connection) -> None:
    programs.remember_environment()
    try:
        target = Target.find(name)
        checks = {check.name: check for check in suite.checks()}
    except Exception as error:
        failure = describe(error)
        if isinstance(error, SdkError) and error.__cause__ is None:  # it says by itself what is wrong
            failure = dataclasses.replace(failure, what=error.what, traceback="")
        _send(connection, {"error": dataclasses.asdict(failure)})
        return
    gc.collect()
    gc.freeze()  # what is there by now is no garbage of any check, and need not be looked through each time
    answers: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "start": lambda request: {},
        "checks": lambda request: [dataclasses.asdict(_item(check, {})) for check in checks.values()],
        "cases": lambda request: [dataclasses.asdict(item) for item in _items(checks[request["check"]], target)],
        "environment": lambda request: environment.gather(target),
        "start fuzz": lambda request: fuzz.start(target, request["ops"]),
        "fuzz": lambda request: _fuzz(target, request["case"]),
        "fuzz reference": lambda request: fuzz.rejected_by_reference(fuzz.Fuzzed.of(request["case"])),
        "run": lambda request: _run(Case(checks[request["check"]], request["parameters"]), target, request["timeout"]),
    }
    while True:
        request = json.loads(connection.recv_bytes())
        _send(connection, answers[request["do"]](request))


def _send(connection: Connection, answer: Any) -> None:
    connection.send_bytes(json.dumps(answer).encode())


def _items(check: Check, target: Target) -> list[Item]:
    """The cases of a check; where it cannot list them, one that says so."""
    try:
        skip = check.needs(target)
        return [_item(check, {}, skip=skip)] if skip else [_item(check, each) for each in check.cases(target)]
    except Exception as error:
        return [_item(check, {}, broken=describe(error))]


def _item(check: Check, parameters: Mapping[str, str], skip: str = "", broken: Failure | None = None) -> Item:
    return Item(
        Case(check, parameters).id,
        check.name,
        check.level,
        dict(parameters),
        check.clause.number,
        check.clause.text,
        check.clause.reason,
        check.isolated,
        check.timeout,
        skip,
        broken,
    )


def _run(case: Case, target: Target, timeout: float) -> Any:
    """Run a case: its verdict, its time, what it told, and why it failed or is excused."""
    patience.allow(timeout / case.check.timeout)
    gc.collect()
    torch.manual_seed(0)
    verdict: Verdict = "passed"
    failure, reason = None, ""
    start = time.perf_counter()
    try:
        case.run(target)
    except ExcusedError as excuse:
        verdict, reason = excuse.verdict, excuse.reason
    except (Exception, SystemExit) as error:
        verdict, failure = "failed", describe(error)
    seconds = time.perf_counter() - start
    sys.stdout.flush()
    return {
        "verdict": verdict,
        "seconds": seconds,
        "reason": reason,
        "facts": take_told(),
        "failure": None if failure is None else dataclasses.asdict(failure),
    }


def _fuzz(target: Target, case: str) -> Any:
    """What comes of a random call; an error of the check itself is a failure, too."""
    try:
        return dataclasses.asdict(fuzz.run(target, fuzz.Fuzzed.of(case)))
    except Exception as error:
        return dataclasses.asdict(fuzz.Found(_trace(error), "", 0, False))


def describe(error: BaseException) -> Failure:
    """What an exception says: for reports."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.endswith(_OURS)]
    own = isinstance(error, NonconformanceError)
    where = _place(frames[-1 if own else 0]) if frames else ""
    trace = "" if own and error.__cause__ is None else _trace(error)
    if isinstance(error, SdkError):
        what = error.what if own else f"{type(error).__name__}: {error.what}"
        return Failure(what, error.why, error.hint, where, trace)
    return Failure(f"{type(error).__name__}: {error}", where=where, traceback=trace)


def _place(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _trace(error: BaseException) -> str:
    """Python's traceback, from the check on."""
    entry: TracebackType | None = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename.endswith(_OURS):
        entry = entry.tb_next
    cause = error.__cause__ or error
    return "".join(traceback.format_exception(type(cause), cause, cause.__traceback__ if cause is not error else entry))


if __name__ == "__main__":
    main()
