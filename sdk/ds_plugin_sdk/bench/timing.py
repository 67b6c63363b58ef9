"""How benchmarks measure: implementations in turns, and the speed of memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Step = Callable[[], object]


def take_turns(steps: Mapping[str, Step], seconds: float) -> dict[str, float]:
    """Median seconds of each step, after one of each that does not count; at least five turns.

    They take turns so that noise falls on all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    for step in steps.values():
        step()
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def copy_rate() -> float:
    """GB/s of copying one large tensor, its bytes read and written."""
    source = torch.randn(64 << 20)
    target = torch.zeros_like(source)
    median = take_turns({"copy": lambda: target.copy_(source)}, 1.0)["copy"]
    return source.nbytes * 2 / median / 1e9
