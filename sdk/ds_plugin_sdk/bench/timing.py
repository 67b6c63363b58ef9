"""How benchmarks measure: cases of our op and its peers, in turns, and the speed of memory."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

Step = Callable[[], object]
Name = TypeVar("Name")
Found = TypeVar("Found")
Spread = tuple[float, float]

_TURN = 2e-3  # seconds; what is faster than this is repeated until a turn takes as long


@dataclass(frozen=True)
class Case:
    """One op on one set of tensors, and the same by others.

    Attributes:
        what: which op, or pass of it.
        setting: the sizes. Geometric means are taken over the cases of a setting.
        ours: our step.
        peers: the steps of others, by name.
        moved: bytes that must be read and written; 0 where memory is no measure.
        grad: whether autograd records; otherwise all runs in inference mode.
        peak: whether the most memory that torch holds meanwhile is of interest.
    """

    what: str
    setting: str
    ours: Step
    peers: Mapping[str, Step] = field(default_factory=dict)
    moved: int = 0
    grad: bool = False
    peak: bool = False


def in_turns(measures: Mapping[Name, Callable[[], Found]], turns: int) -> dict[Name, list[Found]]:
    """What each measurement gave in each turn. They take turns so that noise falls on all alike."""
    found: dict[Name, list[Found]] = {name: [] for name in measures}
    for _ in range(turns):
        for name, measure in measures.items():
            found[name].append(measure())
    return found


def spread(values: Sequence[float]) -> Spread:
    """Tenth and ninetieth percentile of repetitions; of fewer than ten, the lowest and the highest."""
    ordered = sorted(values)
    out = len(ordered) // 10
    return ordered[out], ordered[-1 - out]


class LateError(BaseException):
    """The time is over. Not an `Exception`, so that the code that is stopped does not catch it: files raise
    TimeoutError, too.
    """


@contextlib.contextmanager
def at_most(seconds: float, what: str) -> Iterator[None]:
    """Stop what runs for longer, in Python's next step after that; in the main thread alone. 0 seconds are no limit.

    Raises:
        LateError: the time is over.
    """

    def stop(number: int, frame: object) -> None:
        raise LateError(f"{what} takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def take_turns(steps: Mapping[str, Step], seconds: float) -> dict[str, list[float]]:
    """Seconds of each step in each turn, after two of each that do not count; at least five turns.

    They take turns so that noise falls on all alike.
    """
    repeats = {name: _repeats(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, step in steps.items():
            times[name].append(_seconds(step, repeats[name]))
    return times


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under torch.compile, for the shapes and the number of threads at hand; compiled when it is called."""
    torch.compiler.reset()  # what was compiled for another number of threads keeps to it
    torch._functorch.config.donated_buffer = False  # a backward pass is run many times
    return torch.compile(function, dynamic=False, options={"cpp.threads": torch.get_num_threads()})


def copy_rates() -> list[float]:
    """GB/s of copying one large tensor, its bytes read and written, in each turn."""
    source = torch.randn(64 << 20)
    target = torch.zeros_like(source)
    times = take_turns({"copy": lambda: target.copy_(source)}, 1.0)["copy"]
    return [source.nbytes * 2 / seconds / 1e9 for seconds in times]


def peak_bytes(step: Step) -> int:
    """The most bytes of host memory that torch holds during a call, beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    held = highest = 0
    for event in events:
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def _repeats(step: Step) -> int:
    step()
    return max(1, int(_TURN / max(_seconds(step, 1), 1e-7)))


def _seconds(step: Step, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats
