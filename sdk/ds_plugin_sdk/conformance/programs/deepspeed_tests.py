"""A pytest session that runs files of DeepSpeed's tests, one when it is asked for one: ``... TARGET FD``, there.

A request is ``{"file": ..., "without": [case, ...]}``. It answers ``{"start": case}`` and
``{"end": case, "outcome": ..., "why": ..., "calls": ...}`` for each test, and ``{"done": true}`` after the file. One
session for many files saves most of their time: DeepSpeed's ranks come from one fork server, which has imported torch
and DeepSpeed.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import multiprocessing.pool
import os
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ds_plugin_sdk.conformance.process import pipe_to_parent
from ds_plugin_sdk.conformance.programs import deepspeed_tests_setup

# What stands for a file whose tests cannot be listed, or that is skipped as a whole.
WHOLE_FILE = "(file)"

_LONGEST = 1500

# Seconds that the other ranks of a test have to end after one has failed: most wait for it, up to the test's limit.
_AFTER_FAILURE = 5.0


class Session:
    """A pytest plugin in place of pytest's own collection and loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ends: dict[str, tuple[str, str]] = {}
        self._case = ""
        self._calls = 0

    def pytest_sessionstart(self) -> None:
        """Take the clone itself from the path, where its tests put it: processes they spawn would import its DeepSpeed
        instead of the release."""
        clone = Path.cwd().parent
        sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != clone]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        return True  # files come one at a time

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        while True:
            try:
                request = json.loads(self._connection.recv_bytes())
            except EOFError:
                return True
            self._run(session, request["file"], set(request["without"]))
            self._send({"done": True})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._send({"end": WHOLE_FILE, "outcome": report.outcome, "why": _text(report), "calls": 0})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._ends[nodeid] = ("passed", "")
        self._case, self._calls = _case(nodeid), _calls()
        self._send({"start": _case(nodeid)})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Run the cases without Triton of tests that are for both: they skip themselves where it is not supported."""
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        with pytest.MonkeyPatch.context() as patch:
            if parameters.get("use_triton_ops") is False:
                patch.setattr(_accelerator(), "is_triton_supported", lambda: True)
            yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._ends[report.nodeid][0] != "failed":
            self._ends[report.nodeid] = (report.outcome, _text(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, why = self._ends.pop(nodeid)
        self._send({"end": _case(nodeid), "outcome": outcome, "why": why, "calls": _calls() - self._calls})

    def give_up(self, failure: BaseException) -> None:
        """End the test, a rank of which failed while others hang, and this process, for they cannot be had back."""
        why = "".join(traceback.format_exception(failure))[-_LONGEST:]
        why += f"(the other ranks had not ended {_AFTER_FAILURE:g} s later)"
        self._send({"end": self._case, "outcome": "failed", "why": why, "calls": _calls() - self._calls})
        os._exit(1)

    def _run(self, session: pytest.Session, file: str, without: set[str]) -> None:
        session.shouldfail = session.shouldstop = False
        items = [item for item in session.perform_collect([file]) if _case(item.nodeid) not in without]
        for index, item in enumerate(items):
            following = items[index + 1] if index + 1 < len(items) else None
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        _forget_pools()

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())


def _forget_pools() -> None:
    """Let the harness make new pools of ranks: after what it takes for the last test it closes them, and keeps them."""
    harness = sys.modules.get("unit.common")
    if harness is not None:
        harness.DistributedExec._pool_cache.clear()


def _watch_ranks(session: Session) -> None:
    """Let a test end soon after one of its ranks has failed; a pool waits until all have ended."""
    result: Any = multiprocessing.pool.MapResult
    original = result.get

    def get(self: Any, timeout: float | None = None) -> Any:
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while self._success and not self.ready() and time.monotonic() < end:
            self.wait(0.25)
        if not self._success:
            self.wait(_AFTER_FAILURE)
            if not self.ready():
                session.give_up(self._value)
        return original(self, 0)

    result.get = get


def _accelerator() -> Any:
    return importlib.import_module("deepspeed.accelerator").get_accelerator()


def _calls() -> int:
    """Calls of ops so far, here and in ranks."""
    return 0 if deepspeed_tests_setup.calls is None else deepspeed_tests_setup.calls()


def _case(nodeid: str) -> str:
    """A test's name inside its file."""
    return nodeid.partition("::")[2]


def _text(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why it failed, from the end of pytest's text, or why it was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return report.longreprtext[-_LONGEST:]


def main() -> None:
    connection = pipe_to_parent()
    deepspeed_tests_setup.load()
    # The harness of the tests asks for a fork server each time; it is this one.
    multiprocessing.set_forkserver_preload([deepspeed_tests_setup.__name__])
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:ds-conformance-suite", "--tb=short", "-q"]
    session = Session(connection)
    _watch_ranks(session)
    sys.exit(pytest.main(options, plugins=[session]))


if __name__ == "__main__":
    main()
