"""A worker: a process that answers one request after another until it, or its parent, dies."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ds_plugin_sdk.settings import child_environment

# A device's native code may have to be compiled before the worker can answer.
START_TIMEOUT = 900.0

_GRACE = 5.0
_LAST_LINES = 40

# What says nothing of the check in a stack that Python leaves: the frames below it, and the loaded extensions.
_NOISE = re.compile(r"^Extension modules:|^  File .*(conformance/(worker|check)\.py|<frozen runpy>)")


def pipe_to_parent() -> Connection:
    """The pipe of this process, which a `Worker` has started: requests come and answers go through it.

    Where the parent is gone, this process and all that it has started ends too, whatever it is at.
    """
    descriptor = int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_parent, args=[descriptor], daemon=True).start()
    return Connection(descriptor)


def _end_with_parent(descriptor: int) -> None:
    parent = select.poll()
    parent.register(descriptor, 0)  # which leaves what is always told: that the other end was closed
    parent.poll()
    time.sleep(_GRACE)
    os.killpg(0, signal.SIGKILL)


class WorkerError(Exception):
    """A worker gave no answer.

    Attributes:
        hung: whether it was too late, rather than dead.
        what: how it ended.
        output: the last lines it printed, with the stack that Python left.
    """

    def __init__(self, what: str, output: str, *, hung: bool) -> None:
        super().__init__(what)
        self.what, self.output, self.hung = what, output, hung


class Worker:
    """A process that has loaded a target and answers questions about it.

    Args:
        target: name of the target.
        program: the module it runs, as ``python -m PROGRAM TARGET FD``.
        environment: variables to set.
        folder: where it runs; None: here.
    """

    def __init__(
        self,
        target: str,
        program: str = "ds_plugin_sdk.conformance.worker",
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, target, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=child_environment(**(environment or {})),
            cwd=folder,
        )
        theirs.close()
        self._from = 0

    def ask(self, request: Mapping[str, Any], timeout: float) -> Any:
        """The answer to a request.

        Raises:
            WorkerError: the worker died, or took longer than `timeout` seconds and was killed.
        """
        self.send(request)
        return self.receive(timeout)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request that is answered by several messages."""
        self._from = self._output.seek(0, os.SEEK_END)
        with contextlib.suppress(BrokenPipeError):  # it may have said why, and gone
            self._connection.send_bytes(json.dumps(request).encode())

    def receive(self, timeout: float) -> Any:
        """The next message; errors as those of `ask`."""
        try:
            if self._wait(timeout):
                return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._died() from None
        raise self._hung(timeout)

    def output(self) -> str:
        """The last lines printed since the last request."""
        self._output.seek(self._from)
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if not _NOISE.search(line)][-_LAST_LINES:])

    def close(self) -> None:
        """Let the process end, or end it."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self.kill()

    def kill(self) -> None:
        """End the process, and what it has started, at once."""
        self._connection.close()
        self._kill()
        self._output.close()

    def _wait(self, timeout: float) -> bool:
        """Whether an answer, or the end, came in time. A child of the worker may keep its end of the pipe open."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self._connection.poll(min(0.25, timeout)):
                return True
            if self._process.poll() is not None:
                raise EOFError
        return False

    def _died(self) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._kill()
        code = self._process.returncode
        what = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        return WorkerError(f"the process ended {what}", self.output(), hung=False)

    def _hung(self, timeout: float) -> WorkerError:
        """Have Python print the stacks of all threads, which it does at SIGABRT even where the lock is held."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.kill(self._process.pid, signal.SIGABRT)
            self._process.wait(_GRACE)
        self._kill()
        return WorkerError(f"no answer within {timeout:g} s", self.output(), hung=True)

    def _kill(self) -> None:
        """End the process and all that it has started and that stayed in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
