"""What DeepSpeed calls in a step, before a plugin is installed and after it.

Each side has its own processes, a rank of a group each, which are there all the time and take turns: an accelerator is
chosen once in a process, and what else a machine does meets both sides. Calls that DeepSpeed's own accelerator has not,
or that fail there, are left out: nothing was there before.
"""

from __future__ import annotations

import importlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ds_plugin_sdk.bench.timing import Spread, in_turns, spread
from ds_plugin_sdk.conformance.process import Worker, WorkerError
from ds_plugin_sdk.conformance.programs import free_port
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.jit.store import root
from ds_plugin_sdk.settings import child_environment

# Most that a call may take of what it took before, and what more microseconds mean nothing: where a call takes 0.1, the
# place of its code in memory decides over so much.
LIMIT, NOTHING_US = 1.05, 0.05

# How often new processes measure what was slower: where the system puts threads and code stays for a process's life.
_AGAIN = 2
# Calls that do what DeepSpeed's own do not, and may take longer.
_DOES_MORE = {"empty_cache()": "gives memory back to the system"}

_TURN = 5e-3  # seconds
_MOST = 20_000  # calls in a turn
_START = 900.0  # seconds: DeepSpeed compiles its own ops at their first use
_CALL = 120.0
_PROGRAM = "ds_plugin_sdk.bench.accelerator_calls"
_IMPORT = "import deepspeed; deepspeed.accelerator.get_accelerator()"


@dataclass(frozen=True)
class Row:
    """One call.

    Attributes:
        call: what is called.
        before_us: median microseconds without the plugin.
        after_us: the same with it; None: it fails now.
        times: after / before, median of the turns.
        slower: in three quarters of the turns over `LIMIT` times as long and over `NOTHING_US` more, or it fails.
        does_more: what it does that it did not before; it is not slower then.
        spread: of after_us.
    """

    call: str
    before_us: float
    after_us: float | None
    times: float | None
    slower: bool
    does_more: str = ""
    spread: dict[str, Spread] = field(default_factory=dict)


class Side:
    """The ranks of one side; a context manager.

    Args:
        environment: chooses the accelerator.
        ranks: how many.
    """

    def __init__(self, environment: Mapping[str, str], ranks: int) -> None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        common = {**environment, **meeting, "LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        self._ranks = [
            Worker("", _PROGRAM, environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self._ranks:
            rank.kill()

    def start(self) -> tuple[str, list[str]]:
        """The class of the accelerator, and the names of the calls."""
        answers = [rank.receive(_START) for rank in self._ranks]
        return answers[0]["accelerator"], answers[0]["calls"]

    def seconds(self, call: str, number: int, timeout: float = _CALL) -> float | None:
        """Of a call, one of `number` in a row on each rank, as rank 0 sees it; None if it fails."""
        for rank in self._ranks:
            rank.send({"call": call, "number": number})
        answers = [rank.receive(timeout) for rank in self._ranks]
        found: float | None = answers[0]["seconds"]
        return found


def run(turns: int = 9, only: str = "") -> list[Row]:
    """Measure.

    Args:
        turns: of each call on each side; who is first alternates.
        only: calls whose names contain this.

    Raises:
        SdkError: no plugin is used, DeepSpeed has no accelerator for its device, or a process died.
    """
    return settled(lambda wanted: _run(turns, lambda call: only in call and wanted(call)))


def settled(measure: Callable[[Callable[[str], bool]], Iterable[Row]]) -> list[Row]:
    """The rows of all calls; those of calls that were slower are what new processes found last.

    Args:
        measure: gives the rows of the calls for which its argument holds, by new processes.
    """
    rows = list(measure(lambda call: True))
    for _ in range(_AGAIN):
        slower = {row.call for row in rows if row.slower}
        again = {row.call: row for row in measure(slower.__contains__)} if slower else {}
        rows = [again.get(row.call, row) for row in rows]
    return rows


def _run(turns: int, wanted: Callable[[str], bool]) -> Iterator[Row]:
    found = importlib.import_module("deepspeed.accelerator").get_accelerator()
    device = found.device_name()
    ranks = 2 if device == "cpu" else min(2, found.device_count())
    after = {"DS_ACCELERATOR": device, "TORCH_EXTENSIONS_DIR": str(_compiled())}
    before = {**after, "DS_PLUGIN_AUTOLOAD": "0"}
    if wanted(_IMPORT):
        yield _row(_IMPORT, *_imports((before, after), max(3, turns // 3)))
    try:
        with Side(before, ranks) as theirs, Side(after, ranks) as ours:
            own, calls = theirs.start()
            plugin, _ = ours.start()
            if not own.startswith("deepspeed.") or plugin.startswith("deepspeed."):
                raise SdkError(
                    "there is nothing to compare",
                    plugin=device,
                    why=f"before: {own}, after: {plugin}",
                    hint="install a plugin for a device that DeepSpeed has an accelerator for",
                )
            for call in filter(wanted, calls):
                yield from _measured(call, theirs, ours, turns)
    except WorkerError as error:
        raise SdkError(
            "a process of the benchmark ended", plugin=device, why=f"{error.what}\n{error.output}"
        ) from error


def _compiled() -> Path:
    """Where DeepSpeed's own ops are compiled, once for all runs.

    Its compiler waits for ever for the lock of a process that was killed: those of others are not met here, and one of
    an earlier run is removed.
    """
    folder = root() / ".deepspeed-ops"
    folder.mkdir(parents=True, exist_ok=True)
    for lock in folder.rglob("lock"):
        lock.unlink()
    return folder


def _measured(call: str, theirs: Side, ours: Side, turns: int) -> Iterator[Row]:
    """The row of a call; none if it fails before."""
    first = theirs.seconds(call, 1, _START)  # prepares it, and compiles where it must
    if first is None:
        return
    if ours.seconds(call, 1, _START) is None:
        yield Row(call, first * 1e6, None, None, True)
        return
    number = min(_MOST, max(1, int(_TURN / max(_again(theirs, call, 3), 1e-8))))
    times: dict[Side, list[float]] = {theirs: [], ours: []}
    for turn in range(turns):
        for side in (theirs, ours) if turn % 2 else (ours, theirs):
            times[side].append(_again(side, call, number))
    yield _row(call, times[theirs], times[ours])


def _again(side: Side, call: str, number: int) -> float:
    seconds = side.seconds(call, number)
    if seconds is None:
        raise SdkError("a call fails that did not at first", why=call)
    return seconds


def _row(call: str, before: Sequence[float], after: Sequence[float]) -> Row:
    pairs = list(zip(before, after, strict=True))
    ratios = sorted(now / then for then, now in pairs)
    longer = sum(now > LIMIT * then and now - then > 1e-6 * NOTHING_US for then, now in pairs)
    more = _DOES_MORE.get(call, "")
    slower = longer >= 0.75 * len(pairs) and not more
    then, now = ([1e6 * each for each in side] for side in (before, after))
    times = statistics.median(ratios)
    return Row(call, statistics.median(then), statistics.median(now), times, slower, more, {"after_us": spread(now)})


def _imports(sides: Sequence[Mapping[str, str]], turns: int) -> list[list[float]]:
    """Seconds of new processes that import DeepSpeed and choose an accelerator, by side; the first do not count."""

    def seconds(environment: Mapping[str, str]) -> float:
        start = time.perf_counter()
        command = [sys.executable, "-c", _IMPORT]
        subprocess.run(command, env=child_environment(**environment), check=True, capture_output=True)
        return time.perf_counter() - start

    found = in_turns({number: partial(seconds, side) for number, side in enumerate(sides)}, turns + 1)
    return [each[1:] for each in found.values()]
