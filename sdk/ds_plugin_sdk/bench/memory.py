"""How fast this machine copies and reads large memory: what the other figures' shares are shares of."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ds_plugin_sdk.bench.decode import ReadRate
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
