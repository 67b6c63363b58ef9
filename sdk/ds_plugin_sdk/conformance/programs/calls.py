"""How often the ops of the SDK are called, in a process and in those that it starts: a number in a file.

A test that passes without one says nothing of the kernels.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_plugin_sdk.ops import _library, async_io, pin_memory
from ds_plugin_sdk.ops._c_function import CFunction

_BYTES = 8


def begin(file: Path) -> None:
    """Make the file of a count of 0."""
    file.write_bytes(bytes(_BYTES))


class Calls:
    """Counts the calls of this process from now on.

    0 means none; else the number is rough: an op's first call, which loads its kernels, counts twice, and of two
    processes that add at one moment one may be lost.

    Args:
        file: what `begin` made.
    """

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._count = memoryview(mmap.mmap(opened.fileno(), _BYTES)).cast("Q")

    def __call__(self) -> int:
        return self._count[0]

    def watch(self) -> None:
        """Count what goes by torch's dispatcher from Python, and what goes past it."""
        for each in (torch._ops.OpOverload, torch._ops.OpOverloadPacket):
            self._watch(each, "__call__", lambda op: str(op).startswith(_library.NAMESPACE))
        self._watch(CFunction, "usable")
        self._watch(async_io.AsyncIO, "_begin")
        self._watch(pin_memory, "empty")

    def _watch(self, owner: Any, name: str, ours: Callable[[Any], bool] | None = None) -> None:
        original, count = getattr(owner, name), self._count

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if ours is None or ours(args[0]):
                count[0] += 1
            return original(*args, **kwargs)

        setattr(owner, name, counted)
