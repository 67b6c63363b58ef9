"""The time that a process had for its work: not that in which it was suspended (Ctrl-Z, SIGSTOP, a closed laptop)."""

from __future__ import annotations

import time

_STEP_SECONDS = 2.0  # between two looks; if there were more, this process was suspended


class Stopwatch:
    """Counts from when it is made. It has to be asked several times within two seconds."""

    def __init__(self) -> None:
        self._seen, self._seconds = time.monotonic(), 0.0

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._seen, _STEP_SECONDS)
        self._seen = now
        return self._seconds


__all__ = ["Stopwatch"]
