"""The op families beside their peers: what ``sdk bench ops`` prints and draws.

A family's module offers ``cases(dtype, compile)``, which yields its cases one after the other: their tensors live only
while they are measured. With `compile` there are peers too that take minutes to compile: torch.compile, and DeepSpeed's
own ops.
"""

from __future__ import annotations

import importlib
import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ds_plugin_sdk.bench.timing import Case, Spread, Step, copy_rates, peak_bytes, spread, take_turns
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.registry import get_accelerator

FAMILIES = (
    "calls",
    "direct",
    "adam",
    "lamb",
    "transformer",
    "quantizer",
    "fp_quantizer",
    "sparse_attention",
    "evoformer",
    "inference",
)
DTYPES = ("float32", "bfloat16")
MEAN = "geometric mean"

# Where a mean over all cases of a setting says something.
_WITH_MEANS = ("transformer", "inference")


@dataclass(frozen=True)
class Row:
    """One case, measured; or the geometric means of a setting.

    Attributes:
        what: which op, or pass of it.
        setting: the sizes.
        dtype: of all tensors.
        threads: torch's.
        microseconds: median wall time of our step.
        times_copy: bytes that must be moved, over that time, in multiples of the rate of copying one large tensor.
        peak_mib: the most memory that torch held during our step, where that was of interest.
        times: our speed in multiples of each peer's, by the peers' names.
        spread: of the microseconds.
    """

    what: str
    setting: str
    dtype: str
    threads: int
    microseconds: float | None
    times_copy: float | None
    peak_mib: float | None
    times: dict[str, float]
    spread: dict[str, Spread] = field(default_factory=dict)


def run(
    family: str,
    *,
    threads: Sequence[int] = (1,),
    dtypes: Sequence[str] = DTYPES,
    compile: bool = False,
    seconds: float = 1.0,
) -> list[Row]:
    """Measure a family on this machine's CPU; a peer that does not run here is left out, with a warning.

    The chosen plugin's accelerator is made first, as in a program that trains: the CPU plugin's has freed memory kept,
    of which the peers have as much as we.

    Args:
        family: one of `FAMILIES`.
        threads: torch's numbers of threads to measure with.
        dtypes: of `DTYPES`.
        compile: measure peers too that must be compiled.
        seconds: time to spend on each case; every step has at least five turns.

    Raises:
        SdkError: no such family or dtype.
    """
    _check("family", [family], FAMILIES)
    _check("dtype", dtypes, DTYPES)
    get_accelerator()
    cases = importlib.import_module(f"ds_plugin_sdk.bench.{family}").cases
    before, rows = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            rate = statistics.median(copy_rates())
            for dtype in dtypes:
                found = [_measure(case, dtype, count, rate, seconds) for case in cases(getattr(torch, dtype), compile)]
                rows += found + (_means(found) if family in _WITH_MEANS else [])
    finally:
        torch.set_num_threads(before)
    return rows


def _check(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise SdkError(f"There is no {what} {name!r}", hint=f"one of: {', '.join(known)}")


def _measure(case: Case, dtype: str, threads: int, rate: float, seconds: float) -> Row:
    with torch.inference_mode(not case.grad):
        peers = {name: step for name, step in case.peers.items() if _runs(name, step)}
        turns = take_turns({"": case.ours, **peers}, seconds)
        peak = peak_bytes(case.ours) / 2**20 if case.peak else None
    own = [1e6 * each for each in turns[""]]
    medians = {name: statistics.median(values) for name, values in turns.items()}
    ours = medians.pop("")
    times_copy = case.moved / ours / 1e9 / rate if case.moved else None
    times = {name: median / ours for name, median in medians.items()}
    bounds = {"microseconds": spread(own)}
    return Row(case.what, case.setting, dtype, threads, ours * 1e6, times_copy, peak, times, bounds)


def _runs(name: str, step: Step) -> bool:
    try:
        step()
    except Exception as error:
        warnings.warn(f"{name} is not compared: {error}", RuntimeWarning, stacklevel=2)
        return False
    return True


def _means(rows: Sequence[Row]) -> list[Row]:
    """The geometric means over each setting; of a peer, over the rows that have it."""
    means = []
    for setting in dict.fromkeys(row.setting for row in rows):
        chosen = [row for row in rows if row.setting == setting]
        peers = dict.fromkeys(peer for row in chosen for peer in row.times)
        times = {peer: statistics.geometric_mean(r.times[peer] for r in chosen if peer in r.times) for peer in peers}
        means.append(Row(MEAN, setting, rows[0].dtype, rows[0].threads, None, None, None, times))
    return means
