"""DeepSpeed's tests in a process of their own, which is replaced when a test hangs or crashes it."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_plugin_sdk.conformance.process import START_TIMEOUT, Worker, WorkerError
from ds_plugin_sdk.conformance.programs import calls
from ds_plugin_sdk.conformance.target import Target

# Seconds for a test on its ranks, as the tests' own harness counts them, and for any test.
RANKS_SECONDS, CASE_SECONDS = 120.0, 240.0

_PROGRAM = "ds_plugin_sdk.conformance.programs.deepspeed_tests"
_WHOLE_FILE = "(file)"

# The devices whose visibility the tests' harness sets itself, by the vendors' tools.
_KNOWN_DEVICES = frozenset({"cuda", "xpu", "hpu", "npu", "supa", "cpu"})


@dataclass(frozen=True)
class Result:
    """How a test ended: ``passed``, ``failed``, ``skipped``, ``crashed``, ``timed out`` or ``not run``; why; and
    how many calls of the SDK's ops were seen in it, in all ranks together."""

    outcome: str
    why: str = ""
    calls: int = 0


class Session:
    """Runs files of tests on a target.

    Args:
        target: what they run on.
        folder: the folder ``tests`` of DeepSpeed's repository.
        ranks: how many devices the tests find.
    """

    def __init__(self, target: Target, folder: Path, ranks: int = 2) -> None:
        self._target, self._folder, self._ranks = target, folder, ranks
        self._worker: Worker | None = None
        self._limit = START_TIMEOUT
        # DeepSpeed's own compiler waits for ever for the lock of a process that was killed: nobody else is to meet it.
        self._compiled = tempfile.TemporaryDirectory(prefix="conformance-")

    def run(self, file: str, seconds: float) -> dict[str, Result]:
        """How each test of a file ended.

        A test that hangs or crashes the process is lost alone: a new process runs those after it.

        Args:
            file: its path in the folder.
            seconds: for the file; tests that have not begun by then are not run.
        """
        results: dict[str, Result] = {}
        end = time.monotonic() + seconds
        while True:
            started: tuple[str, float] | None = None
            try:
                for message in self._messages(file, results):
                    if "start" in message:
                        started = message["start"], time.monotonic()
                    elif "end" in message:
                        results[message["end"]] = Result(message["outcome"], message["why"], message["calls"])
                    else:
                        return results
                    if time.monotonic() > end:
                        self.close()
                        results[_WHOLE_FILE] = Result("not run", f"tests after the first {seconds:g} s of the file")
                        return results
            except WorkerError as error:
                self.close()
                if started is None:
                    results[_WHOLE_FILE] = Result("crashed", f"{error.what}\n{error.output}")
                    return results
                case, began = started
                if case in results:  # the process ended with it
                    continue
                late = error.hung or time.monotonic() - began >= RANKS_SECONDS
                results[case] = Result("timed out" if late else "crashed", f"{error.what}\n{error.output}")

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
            for lock in Path(self._compiled.name).rglob("lock"):
                lock.unlink()

    def _messages(self, file: str, results: dict[str, Result]) -> Any:
        if self._worker is None:
            self._worker, self._limit = self._start(), START_TIMEOUT
        worker = self._worker
        worker.send({"file": file, "without": list(results)})
        while True:
            yield worker.receive(self._limit)
            self._limit = CASE_SECONDS

    def _start(self) -> Worker:
        counted = Path(self._compiled.name) / "calls"
        calls.begin(counted)
        environment = {
            "DS_PLUGIN_CONFORMANCE_CALLS": str(counted),
            "DS_PLUGIN_CONFORMANCE_TARGET": self._target.name,
            "DS_UNITTEST_TIMEOUT": f"{RANKS_SECONDS:g}",
            "LOCAL_SIZE": str(self._ranks),
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": self._compiled.name,
            # Models and data are not downloaded: what asks for them fails at once, on every accelerator.
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "WANDB_MODE": "offline",
        }
        if self._target.plugin is not None:
            environment["DS_ACCELERATOR"] = self._target.plugin.name
        if self._target.device_type not in _KNOWN_DEVICES:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(self._ranks)))
        return Worker(self._target.name, _PROGRAM, environment=environment, folder=self._folder)
