"""Files: ours with io_uring, on threads and in Python, DeepSpeed's own op over libaio, and plain calls.

All write and read the same page-aligned, locked memory past the page cache, on the file system of a folder. Peers take
turns, so that what else a machine does meets all of them; speeds are medians.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ds_plugin_sdk.ops import async_io, pin_memory

BLOCKS = tuple(1 << n for n in (17, 20, 23))
THREADS = (1, 4, 16)
BACKENDS: tuple[Literal["io_uring", "threads", "python"], ...] = ("io_uring", "threads", "python")
TURNS = 3
DEPTH = 16


@dataclass(frozen=True)
class Row:
    """One way to write and to read a file.

    Attributes:
        block_kib: size of a request.
        threads: how many the file is divided among.
        how: io_uring, threads, python; libaio is DeepSpeed's own op; plain is one pwrite or pread after the other.
        write_gb_s: 10^9 bytes a second.
        read_gb_s: the same.
        write_ratio: in multiples of libaio's, or of plain's where there is no libaio.
        read_ratio: the same.
    """

    block_kib: int
    threads: int
    how: str
    write_gb_s: float
    read_gb_s: float
    write_ratio: float | None
    read_ratio: float | None


Pair = tuple[Callable[[], object], Callable[[], object]]  # writes the file, reads it


def run(
    folder: Path,
    size: int = 256 << 20,
    blocks: Sequence[int] = BLOCKS,
    threads: Sequence[int] = THREADS,
    *,
    deepspeed: bool = True,
) -> Iterator[Row]:
    """Measure.

    Args:
        folder: where the file is made, and removed again.
        size: its bytes.
        blocks: sizes of requests in bytes.
        threads: numbers of threads.
        deepspeed: also DeepSpeed's own op.
    """
    memory = pin_memory.empty(size, torch.uint8).fill_(7)
    own = _deepspeeds_own() if deepspeed else None
    with tempfile.TemporaryDirectory(dir=folder) as made:
        path = Path(made, "file")
        for block in blocks:
            for count in threads:
                pairs = dict(_ours(memory, path, block, count))
                if own is not None:
                    pairs["libaio"] = _handle(own.aio_handle(block, DEPTH, False, True, count), memory, path)
                if count == 1:
                    pairs["plain"] = _plain(memory, path, block)
                yield from _measure(pairs, size, block, count)


def _measure(pairs: dict[str, Pair], size: int, block: int, threads: int) -> Iterator[Row]:
    seconds: dict[str, tuple[list[float], list[float]]] = {how: ([], []) for how in pairs}
    for _ in range(TURNS):
        for how, calls in pairs.items():
            for call, found in zip(calls, seconds[how], strict=True):
                start = time.perf_counter()
                call()
                found.append(time.perf_counter() - start)
    speeds = {how: [size / 1e9 / statistics.median(each) for each in found] for how, found in seconds.items()}
    base = speeds.get("libaio") or speeds.get("plain")
    for how, (write, read) in speeds.items():
        ratios = (write / base[0], read / base[1]) if base else (None, None)
        yield Row(block // 1024, threads, how, write, read, *ratios)


def _ours(memory: torch.Tensor, path: Path, block: int, threads: int) -> Iterator[tuple[str, Pair]]:
    for how in BACKENDS:
        io = async_io.AsyncIO(block, DEPTH, overlap_events=True, threads=threads, backend=how)
        if io.backend == how:  # else this machine has none of it
            yield how, (_call(io, io.write, memory, path), _call(io, io.read, memory, path))


def _call(
    io: async_io.AsyncIO, begin: Callable[[torch.Tensor, Path], None], memory: torch.Tensor, path: Path
) -> Callable[[], object]:
    def call() -> None:
        begin(memory, path)
        io.wait()

    return call


def _handle(handle: Any, memory: torch.Tensor, path: Path) -> Pair:
    locked = handle.new_cpu_locked_tensor(memory.numel(), memory).copy_(memory)  # its own: others it copies first
    return lambda: handle.sync_pwrite(locked, str(path)), lambda: handle.sync_pread(locked, str(path))


def _plain(memory: torch.Tensor, path: Path, block: int) -> Pair:
    """What dd does with ``oflag=direct`` and ``iflag=direct``."""
    view = memoryview(memory.numpy().data)

    def through(flags: int, call: Callable[..., int]) -> None:
        descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        try:
            for start in range(0, len(view), block):
                call(descriptor, [view[start : start + block]], start)
        finally:
            os.close(descriptor)

    return (
        lambda: through(os.O_WRONLY | os.O_CREAT, os.pwritev),
        lambda: through(os.O_RDONLY, os.preadv),
    )


def _deepspeeds_own() -> Any:
    """DeepSpeed's own op, which it compiles where libaio's headers are installed; else None."""
    with contextlib.suppress(Exception):
        builder = importlib.import_module("deepspeed.ops.op_builder.cpu").AsyncIOBuilder()
        return builder.load(verbose=False) if builder.is_compatible(verbose=False) else None
    return None
