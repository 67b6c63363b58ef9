"""The inference ops against the same in torch, eager and compiled: one token of a batch, and a prompt.

Times are CPU times of one thread, which other programs on the machine disturb least.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.op_builder import load_kernels
from ds_plugin_sdk.ops import activation, norm, residual, rotary, softmax

FAMILIES = ("norm", "softmax", "activation", "rotary", "residual")
HIDDEN, INNER, HEADS, HEAD_DIM = 2048, 8192, 16, 128
# Tokens that pass through a layer at once, and keys that they attend to: a step of decoding, and a prompt.
PHASES = {"decode": (4, 1, 512), "prompt": (1, 512, 512)}

_TURN = 2e-3  # seconds; what is timed at once is repeated until it takes that long

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One op on one shape.

    Attributes:
        op: its name; ``all`` for geometric means.
        phase: ``decode``: one token each of a batch of 4; ``prompt``: 512 tokens of one sequence.
        dtype: of all tensors.
        microseconds: median time of a call.
        eager_microseconds: of the same in plain torch, as a model has it.
        compiled_microseconds: of that under torch.compile; None where it was not asked for.
        times_eager: speed in multiples of the eager one.
        times_compiled: speed in multiples of the compiled one.
    """

    op: str
    phase: str
    dtype: str
    microseconds: float | None
    eager_microseconds: float | None
    compiled_microseconds: float | None
    times_eager: float
    times_compiled: float | None


@dataclass(frozen=True)
class _Case:
    op: str
    ours: Callable[..., object]
    torchs: Callable[..., object]
    arguments: Sequence[Tensor]


def run(compiled: bool = True, seconds: float = 1.0) -> list[Row]:
    """Measure every op; the implementations take turns, so that noise falls on all alike.

    Args:
        compiled: compare with torch.compile too, which takes some seconds for each row.
        seconds: time to spend on each row.
    """
    for family in FAMILIES:
        load_kernels(family, "cpu")
    rows: list[Row] = []
    with torch.inference_mode(), _one_thread():
        for dtype in (torch.float32, torch.bfloat16):
            for phase, sizes in PHASES.items():
                rows += [_measure(case, phase, dtype, compiled, seconds) for case in _cases(*sizes, dtype)]
    return rows + [_mean(rows, phase) for phase in PHASES]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cases(batch: int, tokens: int, keys: int, dtype: torch.dtype) -> Iterator[_Case]:
    """Each op beside the line of plain torch that models have in its place."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    x, r, w, b = made(batch, tokens, HIDDEN), made(batch, tokens, HIDDEN), made(HIDDEN), made(HIDDEN)
    shape = (HIDDEN,)
    yield _Case("layer_norm", norm.layer_norm, lambda x, w, b: functional.layer_norm(x, shape, w, b), (x, w, b))
    yield _Case(
        "pre_layer_norm",
        lambda x, r, w, b, c: norm.pre_layer_norm(x, r, w, b, input_bias=c),
        lambda x, r, w, b, c: (functional.layer_norm(x + r + c, shape, w, b), x + r + c),
        (x, r, w, b, w),
    )
    yield _Case("rms_norm", norm.rms_norm, lambda x, w: functional.rms_norm(x, shape, w, 1e-6), (x, w))
    yield _Case(
        "pre_rms_norm",
        norm.pre_rms_norm,
        lambda x, r, w: ((total := x + r), functional.rms_norm(total, shape, w, 1e-6)),
        (x, r, w),
    )
    scores, mask = made(batch, HEADS, tokens, keys), torch.zeros(batch, 1, 1, keys, dtype=dtype)
    yield _Case(
        "softmax",
        lambda s, m: softmax.softmax(s, m, scale=0.1),
        lambda s, m: functional.softmax(s * 0.1 + m, dim=-1),
        (scores, mask),
    )
    hidden, bias = made(batch, tokens, INNER), made(INNER)
    yield _Case(
        "bias_activation gelu_tanh",
        lambda h, b: activation.bias_activation(h, b, "gelu_tanh"),
        lambda h, b: functional.gelu(h + b, approximate="tanh"),
        (hidden, bias),
    )
    yield _Case(
        "bias_activation relu",
        lambda h, b: activation.bias_activation(h, b, "relu"),
        lambda h, b: functional.relu(h + b),
        (hidden, bias),
    )
    yield _Case(
        "gated_activation silu",
        lambda h: activation.gated_activation(h, None, "silu"),
        lambda h: h[..., : INNER // 2] * functional.silu(h[..., INNER // 2 :]),
        (hidden,),
    )
    query = made(batch, tokens, HEADS, HEAD_DIM).transpose(1, 2)
    cos, sin = rotary.angles(torch.arange(tokens), HEAD_DIM)
    yield _Case("rotary", rotary.rotary, _rotary, (query, cos, sin))
    yield _Case(
        "residual_add_bias_",
        lambda r, x, a, b: residual.residual_add_bias_(r, x, a, b, b, scale=0.5),
        lambda r, x, a, b: r.copy_(x + a + (r + b + b) * 0.5),
        (r.clone(), x, x, b),
    )
    yield _Case(
        "moe_res_matmul_",
        residual.moe_res_matmul_,
        lambda o, r, c: o.copy_(o * c[HIDDEN:] + r * c[:HIDDEN]),
        (x.clone(), r, torch.full((2 * HIDDEN,), 0.5, dtype=dtype)),
    )


def _rotary(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As models have it: both halves of the angles, and the halves of a head exchanged."""
    c, s = (torch.cat([table, table], dim=-1).unsqueeze(1).to(query.dtype) for table in (cos, sin))
    first, second = query.chunk(2, dim=-1)
    return query * c + torch.cat([-second, first], dim=-1) * s


def _measure(case: _Case, phase: str, dtype: torch.dtype, compiled: bool, seconds: float) -> Row:
    functions = [case.ours, case.torchs]
    if compiled:
        torch._dynamo.reset()
        functions.append(torch.compile(case.torchs, dynamic=False))
    ours, eager, *others = _take_turns([_bound(function, case.arguments) for function in functions], seconds)
    return Row(
        case.op,
        phase,
        str(dtype).removeprefix("torch."),
        ours * 1e6,
        eager * 1e6,
        others[0] * 1e6 if others else None,
        eager / ours,
        others[0] / ours if others else None,
    )


def _bound(function: Callable[..., object], arguments: Sequence[Tensor]) -> Call:
    return lambda: function(*arguments)


def _take_turns(calls: Sequence[Call], seconds: float) -> list[float]:
    """Median CPU seconds of each call; at least seven turns."""
    repeats = []
    for call in calls:
        call()
        start = time.thread_time()
        call()
        repeats.append(max(1, int(_TURN / max(time.thread_time() - start, 1e-6))))
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 7:
        for call, count, measured in zip(calls, repeats, times, strict=True):
            start = time.thread_time()
            for _ in range(count):
                call()
            measured.append((time.thread_time() - start) / count)
    return [statistics.median(measured) for measured in times]


def _mean(rows: Sequence[Row], phase: str) -> Row:
    chosen = [row for row in rows if row.phase == phase]
    compiled = [row.times_compiled for row in chosen if row.times_compiled is not None]
    eager = statistics.geometric_mean(row.times_eager for row in chosen)
    return Row("all", phase, "", None, None, None, eager, statistics.geometric_mean(compiled) if compiled else None)
