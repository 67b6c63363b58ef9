"""How long the programs of a check may take: as it says, and longer where the user lets the whole case take longer."""

from __future__ import annotations

_times = 1.0


def allow(times: float) -> None:
    """Called before a case: how many times its check's own time it has. Less than one is the case's limit alone."""
    global _times
    _times = max(1.0, times)


def allowed(seconds: float) -> float:
    """The seconds that a program may take for which its check would wait so many."""
    return seconds * _times
