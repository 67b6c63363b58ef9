"""The CUDA ops against torch's own, eager and compiled, and against what DeepSpeed builds: one run, side by side.

    PYTHONPATH=tools python -m gpu_check.cuda_ops --json ops.json

Optimizer steps run on the tensors of real models, which no cache holds. Other ops rotate among sets of arguments that
together are several times the L2 cache, and are timed as replays of a CUDA graph, so that launches do not count.
Implementations take turns; figures are medians. Rates are compared with a copy of one large tensor, measured first.

What was measured is in the file after each case. A kernel that breaks the process's CUDA context ends the program with
status 1; called again with the same file, it continues with the next group of cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_plugin_sdk.bench.timing import in_turns
from ds_plugin_sdk.registry import load_kernels
from gpu_check.cases import DEVICE, Call, Case
from gpu_check.cuda_cases import groups_of_cases
from gpu_check.report import shown

COPY_BYTES = 2 << 30


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation of one case.

    Attributes:
        case: what is computed, on what.
        implementation: whose.
        milliseconds: median time of a call on the device.
        gigabytes_per_second: the bytes that must move, each once, over that time; None where arithmetic counts.
        times_copy: that rate over the rate of a copy.
        speed_of_ours: time of this implementation over that of ours: above 1, ours is faster. None if ours failed.
    """

    case: str
    implementation: str
    milliseconds: float
    gigabytes_per_second: float | None
    times_copy: float | None
    speed_of_ours: float | None


# ---- timing ------------------------------------------------------------------------------------------------------
def take_turns(calls: dict[str, Call], turns: int) -> dict[str, float]:
    """Median milliseconds of each call on the device, after two that do not count."""
    events = in_turns({name: functools.partial(_between_events, call) for name, call in calls.items()}, turns + 2)
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs[2:]) for name, pairs in events.items()}


def _between_events(call: Call) -> tuple[Any, Any]:
    """Events of the current stream before and after a call, which need not have happened yet."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    return start, end


def captured(calls: Sequence[Call]) -> Call:
    """A graph of all calls, one after the other."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # so that the outputs do not share memory
    del kept
    return graph.replay


def rows_of(case: Case, copy_rate: float, turns: int, errors: dict[str, str]) -> Iterator[Row]:
    """Measure a case; an implementation that fails is left out, and its error noted; launches count in what cannot be
    captured. Where ours waits for the device, that is noted too.
    """
    first = next(iter(case.calls))
    count = len(case.calls[first])
    runs: dict[str, Call] = {}
    for name, calls in case.calls.items():
        try:
            calls[0]()
            if name == first and (why := _why_it_waits(calls[0])):
                errors[f"{case.name}, {name} waits for the device"] = why
            capture = case.in_graph and name not in case.not_in_graph
            runs[name] = captured(calls) if capture else _one_after_the_other(calls)
        except Exception as error:
            errors[f"{case.name}, {name}"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    medians = {name: total / count for name, total in take_turns(runs, turns).items()}
    ours = medians.get(first)
    for name, median in medians.items():
        rate = case.moved / median / 1e6 or None
        yield Row(case.name, name, median, rate, rate and rate / copy_rate, ours and median / ours)


def _why_it_waits(call: Call) -> str | None:
    """What torch says of a call after which host and device are in step; None if the host goes ahead."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return _text(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def _one_after_the_other(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def measured_copy_rate() -> float:
    """GB/s of copying one large tensor, bytes read and written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / take_turns({"copy": lambda: target.copy_(source)}, 20)["copy"] / 1e6


# ---- the run -----------------------------------------------------------------------------------------------------
# Families, by one op of each.
OPS = {
    "adam": "adam_",
    "lamb": "lamb_",
    "norm": "layer_norm",
    "softmax": "softmax",
    "activation": "bias_activation",
    "rotary": "rotary",
    "transformer": "dropout_add",
    "quantizer": "quantize",
    "random_ltd": "token_gather",
    "attention": "cached_attention",
    "cross_entropy": "cross_entropy_",
    "linear": "linear",
}


def without_kernels() -> dict[str, str]:
    """The families whose ops would be torch's here, and why: to measure those would say nothing of the kernels."""
    missing = {}
    for family, op in OPS.items():
        try:
            load_kernels(family, DEVICE)
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"ds_plugin::{op}", DEVICE.upper()):
                missing[family] = "no plugin that is available here has them"
        except Exception as error:
            missing[family] = _text(error)
    return missing


@dataclasses.dataclass
class Facts:
    """What is known so far, as it is kept in a file.

    Attributes:
        copy_gigabytes_per_second: of a copy.
        launches: microseconds of the host for a call on few elements.
        begun: groups of cases that were begun, by this process or one before it.
        complete: whether all were measured.
        rows: the figures, `Row` as dictionaries.
        errors: what went wrong, by case.
    """

    copy_gigabytes_per_second: float = 0.0
    launches: dict[str, float] = dataclasses.field(default_factory=dict)
    begun: list[str] = dataclasses.field(default_factory=list)
    complete: bool = False
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    path: Path | None = None

    @staticmethod
    def of(path: Path | None) -> Facts:
        """What a file has, or nothing yet."""
        return Facts(**json.loads(path.read_text()), path=path) if path and path.exists() else Facts(path=path)

    def save(self) -> None:
        """Write the file, at once whole: whoever ends this process finds it so."""
        if self.path is not None:
            new = self.path.with_suffix(".new")
            known = {name: value for name, value in vars(self).items() if name != "path"}
            new.write_text(json.dumps(known, indent=1))
            new.replace(self.path)


def compile_all(own: Path | None) -> None:
    """Call each implementation once, so that torch's compiler keeps what it makes for the process that measures."""
    groups = {name: cases for name, cases in groups_of_cases(own).items() if name != "optimizers"}
    with torch.no_grad():
        for cases in groups.values():
            for case in cases():
                for name, calls in case.calls.items():
                    try:
                        calls[0]()
                    except Exception as error:
                        print(f"{case.name}, {name}: {_text(error)}", flush=True)
                torch.cuda.synchronize()
                del case
                torch.cuda.empty_cache()


def launches() -> dict[str, float]:
    """Microseconds of the host for a call on 8 x 64 elements, medians of batches."""
    from ds_plugin_sdk.ops import norm

    x, weight = torch.randn(8, 64, device=DEVICE), torch.randn(64, device=DEVICE)
    calls: dict[str, Call] = {
        "ds_plugin rms_norm": lambda: norm.rms_norm(x, weight),
        "torch rms_norm": lambda: torch.nn.functional.rms_norm(x, (64,), weight, 1e-6),
        "ds_plugin layer_norm": lambda: norm.layer_norm(x, weight, weight),
        "torch layer_norm": lambda: torch.nn.functional.layer_norm(x, (64,), weight, weight),
        "torch mul": lambda: torch.mul(x, x),
    }

    def batch(call: Call) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            call()
        return (time.perf_counter() - begin) / 200 * 1e6

    with torch.no_grad():
        found = in_turns({name: functools.partial(batch, call) for name, call in calls.items()}, 12)
    return {name: statistics.median(times[2:]) for name, times in found.items()}


def run(deadline: float, turns: int, own: Path | None, facts: Facts) -> bool:
    """Measure what was not begun yet, until all is done or the deadline (`time.monotonic`) has passed.

    Args:
        deadline: no case begins after it.
        turns: measurements of each implementation.
        own: where DeepSpeed's own ops were built, see `deepspeed_cuda_ops`.
        facts: takes what is found out, and is saved after each case.

    Returns:
        Whether this process can still use the GPU.
    """
    facts.errors |= {f"{family} has no kernels here": why for family, why in without_kernels().items()}
    facts.copy_gigabytes_per_second = measured_copy_rate()
    facts.launches = launches()
    with torch.no_grad():
        for group, cases in groups_of_cases(own).items():
            if group in facts.begun:
                continue
            facts.begun.append(group)
            facts.save()
            try:
                for case in cases():
                    _measure(case, facts, turns)
                    facts.save()
                    del case
                    if time.monotonic() > deadline:
                        return True
                    torch.cuda.empty_cache()
            except Exception as error:  # of making a case: the other groups continue
                facts.errors[f"in {group}"] = _text(error)
            if not _gpu_works(group, facts):
                return False
    facts.complete = True
    facts.save()
    return True


def _measure(case: Case, facts: Facts, turns: int) -> None:
    """Add a case's rows, or its error."""
    try:
        rows = rows_of(case, facts.copy_gigabytes_per_second, turns, facts.errors)
        facts.rows += [dataclasses.asdict(row) for row in rows]
    except Exception as error:  # an implementation may raise, or run out of memory
        facts.errors[case.name] = _text(error)


def _gpu_works(group: str, facts: Facts) -> bool:
    """After an illegal access nothing works in this process any more; after a capture that failed, no generator."""
    try:
        torch.randn(1, device=DEVICE)
        torch.cuda.synchronize()
        return True
    except Exception as error:
        facts.errors[f"the GPU after {group}"] = _text(error)
        facts.save()
        return False


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures, written again after each case, and continued")
    parser.add_argument("--seconds", type=float, default=180, help="stop beginning cases after so long")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--deepspeed-ops", type=Path, help="where deepspeed_cuda_ops.py has built DeepSpeed's own ops")
    parser.add_argument("--only-compile", action="store_true", help="call everything once, measure nothing")
    arguments = parser.parse_args()
    if arguments.only_compile:
        return compile_all(arguments.deepspeed_ops)

    facts = Facts.of(arguments.json)
    works = run(time.monotonic() + arguments.seconds, arguments.turns, arguments.deepspeed_ops, facts)
    print(f"copy: {facts.copy_gigabytes_per_second:.0f} GB/s")
    for name, microseconds in facts.launches.items():
        print(f"launch: {name} {microseconds:.2f} us")
    for row in facts.rows:
        print(
            f"{row['case']:32} {row['implementation']:20} {row['milliseconds']:9.4f} ms "
            f"{shown(row['gigabytes_per_second'], '7.0f')} GB/s {shown(row['times_copy'], '5.2f')} of copy  "
            f"ours {shown(row['speed_of_ours'], '5.2f')}x"
        )
    for name, error in facts.errors.items():
        print(f"{name}: {error}")
    sys.exit(not works)


if __name__ == "__main__":
    main()
