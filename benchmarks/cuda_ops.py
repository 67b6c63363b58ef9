"""The CUDA ops against torch's own, eager and compiled, and against what DeepSpeed builds: one run, side by side.

    python benchmarks/cuda_ops.py --json ops.json

Optimizer steps run on the tensors of real models, which no cache holds. Other ops rotate among sets of arguments that
together are several times the L2 cache, and are timed as replays of a CUDA graph, so that launches do not count.
Implementations take turns; figures are medians. Rates are compared with a copy of one large tensor, measured first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own convention
from torch import Tensor

from ds_plugin_sdk.op_builder import load_kernels

Call = Callable[[], object]
DEVICE = "cuda"
COPY_BYTES = 2 << 30
ROTATION_IN_L2 = 4  # the rotated arguments are so many times the L2 cache


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation of one case.

    Attributes:
        case: what is computed, on what.
        implementation: whose.
        milliseconds: median time of a call on the device.
        gigabytes_per_second: the bytes that must move, each once, over that time.
        times_copy: that rate over the rate of a copy.
        speed_of_ours: time of this implementation over that of ours: above 1, ours is faster.
    """

    case: str
    implementation: str
    milliseconds: float
    gigabytes_per_second: float
    times_copy: float
    speed_of_ours: float


@dataclasses.dataclass
class Case:
    """What is compared: for each implementation the calls to rotate among. The first implementation is ours."""

    name: str
    moved: int  # bytes of one call
    calls: dict[str, list[Call]]
    in_graph: bool = True


# ---- timing ------------------------------------------------------------------------------------------------------
def take_turns(calls: dict[str, Call], turns: int) -> dict[str, float]:
    """Median milliseconds of each call on the device, after two that do not count."""
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for call in (*calls.values(), *calls.values()):
        call()
    for _ in range(turns):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


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


def rows_of(case: Case, copy_rate: float, turns: int) -> Iterator[Row]:
    """Measure a case."""
    count = len(next(iter(case.calls.values())))
    if case.in_graph:
        runs = {name: captured(calls) for name, calls in case.calls.items()}
    else:
        runs = {name: _one_after_the_other(calls) for name, calls in case.calls.items()}
    medians = {name: total / count for name, total in take_turns(runs, turns).items()}
    ours = next(iter(medians.values()))
    for name, median in medians.items():
        rate = case.moved / median / 1e6
        yield Row(case.name, name, median, rate, rate / copy_rate, median / ours)


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


# ---- optimizers --------------------------------------------------------------------------------------------------
def gpt2_xl() -> list[tuple[int, ...]]:
    """GPT-2 XL: 1.56 G elements in 580 tensors."""
    h = 1600
    layer = [(h,), (h,), (h, 3 * h), (3 * h,), (h, h), (h,), (h,), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,)]
    return [(50257, h), (1024, h), *layer * 48, (h,), (h,)]


def llama_7b() -> list[tuple[int, ...]]:
    """LLaMA-7B: 6.74 G elements in 291 tensors."""
    h, m = 4096, 11008
    layer = [(h, h)] * 4 + [(m, h), (m, h), (h, m), (h,), (h,)]
    return [(32000, h), *layer * 32, (h,), (32000, h)]


MODELS = {
    "GPT-2 XL float32": (gpt2_xl, torch.float32),
    "LLaMA-7B bfloat16": (llama_7b, torch.bfloat16),
    "2,000 of 1 k float32": (lambda: [(1024,)] * 2000, torch.float32),
}


def optimizer_cases() -> Iterator[Case]:
    """FusedAdam and FusedLamb beside torch's, on the same parameters and gradients."""
    from ds_plugin_sdk.optim import FusedAdam, FusedLamb

    for name, (shapes, dtype) in MODELS.items():
        params = [torch.nn.Parameter(torch.randn(shape, device=DEVICE, dtype=dtype) * 0.02) for shape in shapes()]
        for param in params:
            param.grad = torch.randn_like(param) * 0.01
        elements = sum(param.numel() for param in params)
        size = params[0].element_size()
        adam = {
            "FusedAdam": FusedAdam(params, lr=1e-4, weight_decay=0.01),
            "torch AdamW fused": torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, fused=True),
        }
        if elements < 2e9:
            adam["torch AdamW foreach"] = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, foreach=True)
        yield Case(f"Adam {name}", 7 * size * elements, {n: [o.step] for n, o in adam.items()}, in_graph=False)
        if elements < 2e9:
            # p, g, m, v are read and m, v written; then p, m, v are read and p is written
            lamb = {"FusedLamb": [FusedLamb(params, lr=1e-4).step], "torch foreach": [_foreach_lamb(params)]}
            yield Case(f"LAMB {name}", 10 * size * elements, lamb, in_graph=False)
        del params, adam
        torch.cuda.empty_cache()


def _foreach_lamb(params: Sequence[Tensor]) -> Call:
    """DeepSpeed's LAMB in torch's foreach functions: how it would be written without a kernel."""
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    grads = [p.grad for p in params]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_lerp_(first, grads, 0.1)
        torch._foreach_mul_(second, 0.999)
        torch._foreach_addcmul_(second, grads, grads, 0.001)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_add_(denominators, 1e-8)
        updates = torch._foreach_div(first, denominators)
        ratios = torch._foreach_div(torch._foreach_norm(list(params)), torch._foreach_norm(updates))
        torch._foreach_clamp_min_(ratios, 0.01)
        torch._foreach_clamp_max_(ratios, 10.0)
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(list(params), updates, alpha=-1e-4)

    return step


# ---- ops on activations ------------------------------------------------------------------------------------------
def op_cases() -> Iterator[Case]:
    """Ops of inference and training, on the shapes of one layer."""
    from ds_plugin_sdk.ops import activation, norm, softmax

    half = torch.bfloat16
    for tokens, hidden in ((8192, 4096), (32, 4096), (4096, 8192)):
        shape, weight, bias = (tokens, hidden), _random(hidden, dtype=half), _random(hidden, dtype=half)
        size = tokens * hidden * 2
        yield _case(f"layer_norm {list(shape)}", [shape], 2 * size, {
            "ds_plugin": lambda x, w=weight, b=bias: norm.layer_norm(x, w, b),
            "torch eager": lambda x, w=weight, b=bias: F.layer_norm(x, (x.shape[-1],), w, b),
            "torch compiled": torch.compile(lambda x, w=weight, b=bias: F.layer_norm(x, (x.shape[-1],), w, b)),
        })  # fmt: skip
        yield _case(f"rms_norm {list(shape)}", [shape], 2 * size, {
            "ds_plugin": lambda x, w=weight: norm.rms_norm(x, w),
            "torch eager": lambda x, w=weight: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
            "torch compiled": torch.compile(lambda x, w=weight: F.rms_norm(x, (x.shape[-1],), w, 1e-6)),
        })  # fmt: skip
        yield _case(f"bias_gelu {list(shape)}", [shape], 2 * size, {
            "ds_plugin": lambda x, b=bias: activation.bias_gelu(x, b),
            "torch eager": lambda x, b=bias: F.gelu(x + b, approximate="tanh"),
            "torch compiled": torch.compile(lambda x, b=bias: F.gelu(x + b, approximate="tanh")),
        })  # fmt: skip
    for batch, heads, length in ((8, 16, 2048), (32, 32, 128)):
        shape = (batch, heads, length, length)
        yield _case(f"softmax {list(shape)}", [shape], 4 * batch * heads * length * length, {
            "ds_plugin": lambda x: softmax.softmax(x, scale=0.125),
            "torch eager": lambda x: torch.softmax(x * 0.125, -1),
            "torch compiled": torch.compile(lambda x: torch.softmax(x * 0.125, -1)),
        })  # fmt: skip


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def _case(name: str, shapes: Sequence[tuple[int, ...]], moved: int, functions: dict[str, Callable[..., Any]]) -> Case:
    """A case of functions of tensors, rotating among as many sets of arguments as keep the L2 cache cold."""
    l2 = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    sets = max(2, min(256, -(-ROTATION_IN_L2 * l2 // moved)))
    arguments = [[_random(*shape, dtype=torch.bfloat16) for shape in shapes] for _ in range(sets)]

    def call(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Call:
        return lambda: function(*tensors)

    return Case(name, moved, {n: [call(f, tensors) for tensors in arguments] for n, f in functions.items()})


# ---- the run -----------------------------------------------------------------------------------------------------
def cases() -> Iterator[Case]:
    """All cases; optimizers first."""
    yield from optimizer_cases()
    yield from op_cases()


def run(deadline: float, turns: int) -> tuple[list[Row], dict[str, Any]]:
    """Measure until all is done, or the deadline (`time.monotonic`) has passed.

    Returns:
        The rows, and facts: the copy rate, errors by case, and whether time ran out.
    """
    for family in ("adam", "lamb", "norm", "softmax", "activation"):
        load_kernels(family, DEVICE)
    facts: dict[str, Any] = {"copy_gigabytes_per_second": measured_copy_rate(), "errors": {}, "complete": False}
    rows: list[Row] = []
    with torch.no_grad():
        for case in cases():
            try:
                rows += rows_of(case, facts["copy_gigabytes_per_second"], turns)
            except RuntimeError as error:
                facts["errors"][case.name] = str(error).partition("\n")[0]
            torch.cuda.empty_cache()
            if time.monotonic() > deadline:
                return rows, facts
    facts["complete"] = True
    return rows, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--seconds", type=float, default=180, help="stop beginning cases after so long")
    parser.add_argument("--turns", type=int, default=20)
    arguments = parser.parse_args()
    rows, facts = run(time.monotonic() + arguments.seconds, arguments.turns)
    print(f"copy: {facts['copy_gigabytes_per_second']:.0f} GB/s")
    for row in rows:
        print(
            f"{row.case:32} {row.implementation:20} {row.milliseconds:9.4f} ms {row.gigabytes_per_second:7.0f} GB/s "
            f"{row.times_copy:5.2f} of copy  ours {row.speed_of_ours:5.2f}x"
        )
    for name, error in facts["errors"].items():
        print(f"{name}: {error}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**facts, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
