"""A lock among the threads of a process, which a forked process does not inherit."""

from __future__ import annotations

import os
import threading


class ThreadLock:
    """A lock that one thread may take several times, for ``with``.

    A forked process has a new one: the thread that held it, for a compilation perhaps, is not there to release it.
    """

    def __init__(self) -> None:
        self._renew()
        self._held: list[threading.RLock] = []  # what a forking thread holds stays its own
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._held.append(lock)

    def __exit__(self, *_: object) -> None:
        self._held.pop().release()


__all__ = ["ThreadLock"]
