"""How fast this machine copies and reads large memory: what the other figures' shares are shares of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ds_plugin_sdk import large_pages
from ds_plugin_sdk.bench.timing import Spread, copy_rates, spread


@dataclass(frozen=True)
class Row:
    """One way to use memory.

    Attributes:
        what: copy (of one tensor of 256 MiB; its bytes are read and written) or read (512 MiB, in large pages).
        threads: torch's.
        gb_s: 10^9 bytes a second, median.
        spread: of that.
    """

    what: str
    threads: int
    gb_s: float
    spread: dict[str, Spread] = field(default_factory=dict)


def run(threads: Sequence[int] = (1,)) -> Iterator[Row]:
    """Measure with each number of threads."""
    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            read = ReadRate(512 << 20)
            for what, rates in (("copy", copy_rates()), ("read", [read() / 1e9 for _ in range(7)])):
                yield Row(what, count, statistics.median(rates), {"gb_s": spread(rates)})
    finally:
        torch.set_num_threads(before)


class ReadRate:
    """Bytes per second of reading large memory with all of torch's threads, in the largest pages there are.

    It is read by the faster one of two of torch's functions, a sum and a product of a matrix with a vector: each of
    them waits for its arithmetic on some CPUs.

    Args:
        size: bytes of the memory.
    """

    def __init__(self, size: int = 256 << 20) -> None:
        memory = large_pages.zeros((size // _ROW, _ROW // 4), torch.empty(0))
        memory.fill_(1)  # all zeros may be one page
        vector = torch.zeros(_ROW // 4)
        self._size = memory.nbytes
        ways: list[Callable[[], object]] = [memory.view(torch.int64).sum, lambda: memory.mv(vector)]
        for way in ways:
            way()
        self._read = min(ways, key=_seconds)

    def __call__(self) -> float:
        return self._size / _seconds(self._read)


# Bytes of a row of the matrix.
_ROW = 16 << 10


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
