"""A lock that saves duplicate work and does nothing else: entries are right with it and without it.

It is the operating system's (`flock`), so it ends with its process, however that ends. Nobody waits for ever: after the
time limit, and on file systems without locks, the caller builds alongside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ds_plugin_sdk.jit.stopwatch import Stopwatch

_log = logging.getLogger("ds_plugin_sdk.jit")

_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 5.0


@contextlib.contextmanager
def building(path: Path, what: str, *, timeout: float, done: Callable[[], bool], group: bool = False) -> Iterator[None]:
    """Hold the lock `path` while building `what`; go ahead without it if it cannot be had.

    Args:
        path: the lock file; its folder must exist. It is never deleted.
        what: the op, for messages.
        timeout: seconds to wait for the holder.
        done: asked while waiting; true once the holder has delivered, which ends the wait.
        group: whether the file is for all members of its group.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError:  # another user's
        yield
        return
    try:
        if group and os.fstat(file).st_uid == os.geteuid():
            os.fchmod(file, 0o660)
        if _acquire(file, what, timeout, done):
            _sign(file)
        yield
    finally:
        _release(file)


def _acquire(file: int, what: str, timeout: float, done: Callable[[], bool]) -> bool:
    waiting = Stopwatch()
    told = False
    while not (held := _try(file)):
        waited = waiting.seconds()
        if held is None or done():
            return False
        if waited > timeout:
            _log.warning(
                "op '%s': waited %.0f s for %s; building it here too (DS_PLUGIN_LOCK_TIMEOUT)",
                what,
                waited,
                _holder(file),
            )
            return False
        if waited > _PATIENCE_SECONDS and not told:
            told = True
            _log.warning("op '%s': waiting for %s, which is compiling it", what, _holder(file))
        time.sleep(_POLL_SECONDS)
    return True


def _try(file: int) -> bool | None:
    """Whether the lock is ours now; None where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _release(file: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_UN)  # closing alone leaves it to processes that were forked meanwhile
    os.close(file)


def _sign(file: int) -> None:
    """Write into the lock file who holds it, for those who wait."""
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")})
    with contextlib.suppress(OSError):  # a full disk must not stop a build here
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)


def _holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 1000, 0))
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
