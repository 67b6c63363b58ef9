"""Lets torch's own threads finish before Python does, so that a process whose work is done ends with status 0.

Collectives of torch's gloo, and the backward pass on every device but the CPU, run on threads of torch's, and the
program goes on as soon as a result is there. Such a thread may then still hold the last reference to a tensor that
Python knows, and needs the GIL to drop it. Up to Python 3.13 a thread that asks for the GIL while the interpreter ends
is ended there and then; inside torch's destructors that is "terminate called without an active exception" and SIGABRT.
`destroy_process_group` does not wait for gloo's threads while anything still refers to a group, and DeepSpeed's engines
do; nothing waits for those of the backward pass. See docs/decisions/0051.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

# What torch calls these threads, and gloo the one that they wait for, as Linux writes it; pt_autograd_0 and so on, one
# for each device.
_NAMES = ("(pt_gloo_runloop)", "(gloo_tcp_loop)", "(pt_autograd_")
_LOOKS = 3  # in a row without a thread at work
_PAUSE = 0.005  # seconds between two looks, without the GIL: what waits for it gets it


def wait_at_exit() -> None:
    """Call `wait` when the interpreter ends, after what the program itself registers from now on. Idempotent."""
    atexit.unregister(wait)
    atexit.register(wait)


def wait(seconds: float = 1.0) -> None:
    """Return when all of these threads sleep, or after `seconds`; at once if there are none."""
    end = time.monotonic() + seconds
    quiet = 0
    while quiet < _LOOKS and time.monotonic() < end:
        states = list(_states())
        if not states:
            return
        quiet = quiet + 1 if all(state == "S" for state in states) else 0
        time.sleep(_PAUSE)


def _states() -> Iterator[str]:
    """What the threads do: R, running or about to; S, sleeping; and the other letters of proc(5)."""
    for stat in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            # Linux cuts a name at 15 bytes, which may be in the middle of a letter.
            text = stat.read_text(encoding="ascii", errors="replace")
            if any(name in text for name in _NAMES):
                yield text.rpartition(")")[2].split()[0]


__all__ = ["wait", "wait_at_exit"]
