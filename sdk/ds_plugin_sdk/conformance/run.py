"""Running cases: one worker for many of a level, one of their own for those that need it, a new one after a crash."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ds_plugin_sdk.conformance.outcome import Failure, Item, Outcome, item_from_dict
from ds_plugin_sdk.conformance.process import START_TIMEOUT, Worker, WorkerError
from ds_plugin_sdk.errors import ConformanceError


class UnusableTargetError(ConformanceError):
    """A target that no worker can load."""


class Runner:
    """Runs cases of one target. A context manager, for it holds a process.

    Args:
        target: name of an installed plugin, or ``module:attribute``, as `Target.find` takes it.
        timeout: seconds for each case instead of its check's own.
        ahead: load the next worker while an isolated case runs.
        environment: variables to set for the workers.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float | None = None,
        ahead: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.target = target
        self._timeout, self._ahead, self._environment = timeout, ahead, environment
        self._worker: Worker | None = None
        self._used = False  # whether the worker has run a case
        self._next: Worker | None = None
        self._level = ""

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def items(self, clause: str = "") -> list[Item]:
        """Every case of the target, in the order of levels and clauses; with `clause`, those of one clause.

        Raises:
            ConformanceError: the target cannot be had, or two cases have one id.
        """
        checks = [item_from_dict(each) for each in self._ask({"do": "checks"})]
        wanted = [check for check in checks if clause in ("", check.clause)]
        items = [item for check in wanted for item in self._cases_of(check)]
        twice = [case for case, count in Counter(item.id for item in items).items() if count > 1]
        if twice:
            raise ConformanceError(f"two cases are called '{twice[0]}'", why="a check's cases must differ")
        return items

    def environment(self) -> dict[str, Any]:
        """What `ds_plugin_sdk.conformance.environment` gathers in the worker.

        Raises:
            ConformanceError: the target cannot be had.
        """
        found: dict[str, Any] = self._ask({"do": "environment"})
        return found

    def run(self, item: Item) -> Outcome:
        """What comes of a case."""
        if item.skip:
            return Outcome(item, "skipped", reason=item.skip)
        if item.broken is not None:
            return Outcome(item, "failed", failure=item.broken)
        if item.isolated and self._used:
            self._retire()
        item = dataclasses.replace(item, timeout=self._timeout or item.timeout)
        start = time.perf_counter()
        try:
            worker = self._ready(item.level)
            self._used = True
            if item.isolated and self._ahead:
                self._next = self._start()
            request = {"do": "run", "check": item.check, "parameters": item.parameters, "timeout": item.timeout}
            answer = worker.ask(request, item.timeout)
            if answer["failure"] is not None:
                answer["failure"] = Failure(**{**answer["failure"], "output": worker.output()})
            return Outcome(item, **answer)
        except WorkerError as error:
            self._retire()
            return _without_answer(item, error, time.perf_counter() - start)
        except ConformanceError as error:  # it loaded before, and now it does not
            return Outcome(item, "failed", failure=Failure(error.what, error.why, error.hint))
        finally:
            if item.isolated:
                self._retire()

    def close(self) -> None:
        """End the workers; others begin when they are needed."""
        self._retire()
        if self._next is not None:
            self._next.close()
            self._next = None

    def _start(self) -> Worker:
        return Worker(self.target, environment=self._environment)

    def _retire(self) -> None:
        """End the worker that ran the last case."""
        if self._worker is not None:
            self._worker.close()
            self._worker, self._used = None, False

    def _cases_of(self, check: Item) -> list[Item]:
        """The cases of a check, which asks the target for them: that may end the worker too."""
        try:
            return [item_from_dict(each) for each in self._ready("").ask({"do": "cases", "check": check.check}, 60)]
        except WorkerError as error:
            self._retire()
            return [dataclasses.replace(check, broken=Failure(error.what, output=error.output))]

    def _ready(self, level: str) -> Worker:
        """A worker that has loaded the target, and has run cases of this level only."""
        if self._worker is not None and self._level not in ("", level):
            self._retire()
        self._level = level
        if self._worker is None:
            self._worker, self._next = self._next or self._start(), None
            answer = self._worker.ask({"do": "start"}, START_TIMEOUT)
            if "error" in answer:
                self._retire()
                raise _unusable(self.target, Failure(**answer["error"]))
        return self._worker

    def _ask(self, request: dict[str, str]) -> Any:
        try:
            return self._ready("").ask(request, START_TIMEOUT)
        except WorkerError as error:
            self._retire()
            raise _unusable(self.target, Failure(error.what, traceback=error.output)) from None


def _without_answer(item: Item, error: WorkerError, seconds: float) -> Outcome:
    failure = Failure(error.what, output=error.output)
    return Outcome(item, "timed out" if error.hung else "crashed", seconds, failure)


def _unusable(target: str, failure: Failure) -> UnusableTargetError:
    why = ": ".join(filter(None, [failure.what, failure.why]))
    return UnusableTargetError(
        "the target cannot be used",
        plugin=target,
        why="\n".join(filter(None, [why, failure.traceback])),
        hint=failure.hint or "sdk list --explain says which plugins there are, and how they do",
    )
