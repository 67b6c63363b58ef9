"""Files: ours with io_uring, on threads and in Python, DeepSpeed's own op over libaio, and plain calls.

All write and read page-aligned, locked memory past the page cache, on the file system of a folder; the file is there
before, so that nobody's time has the allocation of its blocks. Peers take turns, so that what else a machine does meets
all of them; speeds are medians.
"""

from __future__ import annotations

import importlib
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ds_plugin_sdk.bench.timing import Spread, Step, spread, take_turns
from ds_plugin_sdk.ops import async_io, pin_memory

BLOCKS = tuple(1 << n for n in (17, 20, 23))
THREADS = (1, 4, 16)
BACKENDS: tuple[Literal["io_uring", "threads", "python"], ...] = ("io_uring", "threads", "python")
DEPTH = 16
_VERBS = ("write", "read")


@dataclass(frozen=True)
class Row:
    """One way to write and to read a file.

    Attributes:
        block_kib: size of a request.
        threads: how many the file is divided among.
        how: io_uring, threads, python; libaio is DeepSpeed's own op; plain is one pwrite or pread after the other
            on each thread, as by dd.
        write_gb_s: 10^9 bytes a second.
        read_gb_s: the same.
        write_ratio: in multiples of libaio's, or of plain's where there is no libaio.
        read_ratio: the same.
        spread: of both speeds.
    """

    block_kib: int
    threads: int
    how: str
    write_gb_s: float
    read_gb_s: float
    write_ratio: float | None
    read_ratio: float | None
    spread: dict[str, Spread] = field(default_factory=dict)


Pair = tuple[Step, Step]  # writes the file, reads it


def run(
    folder: Path,
    size: int = 128 << 20,
    blocks: Sequence[int] = BLOCKS,
    threads: Sequence[int] = THREADS,
    *,
    deepspeed: bool = True,
    seconds: float = 5.0,
    tell: Callable[[str], object] = lambda line: None,
) -> Iterator[Row]:
    """Measure.

    Args:
        folder: where the file is made, and removed again.
        size: its bytes. Of less than a block for each thread, some threads have nothing to do.
        blocks: sizes of requests in bytes.
        threads: numbers of threads.
        deepspeed: also DeepSpeed's own op; a warning says why where it cannot be had.
        seconds: time to spend on a size of blocks and a number of threads; each call has at least five turns.
        tell: gets a line before what takes minutes.
    """
    memory = pin_memory.empty(size, torch.uint8).fill_(7)
    own = None
    if deepspeed:
        tell("loading DeepSpeed's own op, which is compiled where it was not before: minutes, once; --no-deepspeed")
        own = _Own(memory)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        path = Path(made, "file")
        _plain(memory, path, BLOCKS[-1], 1)[0]()
        for block in blocks:
            for count in threads:
                pairs = dict(_ours(memory, path, block, count))
                if own is not None and own.module is not None:
                    pairs["libaio"] = own.pair(path, block, count)
                pairs["plain"] = _plain(memory, path, block, count)
                yield from _measure(pairs, size, block, count, seconds)


def _measure(pairs: dict[str, Pair], size: int, block: int, threads: int, seconds: float) -> Iterator[Row]:
    calls = {f"{how} {verb}": call for how, pair in pairs.items() for verb, call in zip(_VERBS, pair, strict=True)}
    turns = take_turns(calls, seconds)
    speeds = {call: [size / 1e9 / each for each in times] for call, times in turns.items()}
    medians = {how: [statistics.median(speeds[f"{how} {verb}"]) for verb in _VERBS] for how in pairs}
    base = medians.get("libaio") or medians["plain"]
    for how, (write, read) in medians.items():
        bounds = {f"{verb}_gb_s": spread(speeds[f"{how} {verb}"]) for verb in _VERBS}
        yield Row(block // 1024, threads, how, write, read, write / base[0], read / base[1], bounds)


def _ours(memory: torch.Tensor, path: Path, block: int, threads: int) -> Iterator[tuple[str, Pair]]:
    for how in BACKENDS:
        io = async_io.AsyncIO(block, DEPTH, overlap_events=True, threads=threads, backend=how)
        if io.backend == how:  # else this machine has none of it
            yield how, (_call(io, io.write, memory, path), _call(io, io.read, memory, path))


def _call(io: async_io.AsyncIO, begin: Callable[[torch.Tensor, Path], None], memory: torch.Tensor, path: Path) -> Step:
    def call() -> None:
        begin(memory, path)
        io.wait()

    return call


def _plain(memory: torch.Tensor, path: Path, block: int, threads: int) -> Pair:
    """What dd does with ``oflag=direct`` and ``iflag=direct``, on each thread with a part of the file."""
    view = memoryview(memory.numpy().data)
    share = -(-len(view) // (threads * block)) * block

    def part(descriptor: int, call: Callable[..., int], begin: int) -> None:
        for start in range(begin, min(begin + share, len(view)), block):
            piece = view[start : min(start + block, begin + share)]
            _expect(call(descriptor, [piece], start), len(piece), "a plain call")

    def through(flags: int, call: Callable[..., int]) -> None:
        descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda begin: part(descriptor, call, begin), range(0, len(view), share)))
        finally:
            os.close(descriptor)

    return (
        lambda: through(os.O_WRONLY | os.O_CREAT, os.pwritev),
        lambda: through(os.O_RDONLY, os.preadv),
    )


class _Own:
    """DeepSpeed's own op, which it compiles where libaio's headers are installed.

    Attributes:
        module: None, after a warning, where it cannot be had.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.module: Any = None
        try:
            builder = importlib.import_module("deepspeed.ops.op_builder.cpu").AsyncIOBuilder()
            if not builder.is_compatible(verbose=False):
                raise RuntimeError("it does not find libaio: install libaio-dev, or libaio-devel")
            self.module = builder.load(verbose=False)
        except Exception as error:
            warnings.warn(f"DeepSpeed's own op is not compared: {error}", RuntimeWarning, stacklevel=3)
            return
        # Its own memory, once for all: what it did not allocate itself, it copies first.
        self._memory = self.module.aio_handle().new_cpu_locked_tensor(memory.numel(), memory).copy_(memory)

    def pair(self, path: Path, block: int, threads: int) -> Pair:
        handle = self.module.aio_handle(block, DEPTH, False, True, threads)
        return (
            lambda: _expect(handle.sync_pwrite(self._memory, str(path), 0), 1, "DeepSpeed's own op"),
            lambda: _expect(handle.sync_pread(self._memory, str(path), 0), 1, "DeepSpeed's own op"),
        )


def _expect(found: int, expected: int, who: str) -> None:
    """Raise rather than give the speed of something that was not done."""
    if found != expected:
        raise RuntimeError(f"{who} gave {found} where {expected} was expected")
