"""Programs that a benchmark starts: none of their processes outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial

_GRACE = 10.0  # seconds for a launcher to stop its ranks, which are in groups of their own


def run(
    command: Sequence[str], environment: Mapping[str, str], *, limit: float | None = None, apart: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program, and keep what it prints.

    Args:
        command: program and arguments.
        environment: its variables, all of them.
        limit: seconds that it may take.
        apart: in a session of its own, whose processes all end with it; else in this one's, which is ended with it by
            who has started this one so.

    Raises:
        subprocess.TimeoutExpired: it took longer, and has been stopped.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=apart,
    )
    send = partial(os.killpg if apart else os.kill, process.pid)
    try:
        printed, said = process.communicate(timeout=limit)
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(ProcessLookupError):
            send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE)
        raise
    finally:
        if apart or process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                send(signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, printed, said)
