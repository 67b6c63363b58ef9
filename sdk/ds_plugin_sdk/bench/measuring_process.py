"""Measurements in a process of their own: what crashes there, or is set up there, is not in the others' way."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from ds_plugin_sdk.settings import child_environment


class MeasuringProcess:
    """A module as a program that measures whenever it is asked, by `serve`.

    Args:
        module: its name.
        arguments: of the program.
        environment: variables that are others there.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=child_environment(**(environment or {})),
        )

    def __enter__(self) -> MeasuringProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def measure(self) -> Any:
        """What the program measured, from JSON.

        Raises:
            RuntimeError: it ended; with what it has said last. It is ended if nobody waits.
        """
        try:
            answer = self._answer()
        except BaseException:
            self._process.kill()  # it would go on beside what is measured next
            raise
        if not answer:
            status = self._process.wait()
            self._said.seek(0)
            said = self._said.read().strip().splitlines()[-1:]
            how = f"by a signal ({signal.strsignal(-status)})" if status < 0 else f"with status {status}"
            raise RuntimeError(f"its process ended {how}" + "".join(f"; it had said: {line}" for line in said))
        return json.loads(answer)

    def _answer(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self._process.stdout.readline()


def serve(measure: Callable[[], object]) -> None:
    """What that program does: for each line of input it measures, and prints the result as a line of JSON."""
    for _ in sys.stdin:
        sys.stdout.write(json.dumps(measure()) + "\n")
        sys.stdout.flush()


__all__ = ["MeasuringProcess", "serve"]
