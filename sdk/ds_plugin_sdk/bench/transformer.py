"""The transformer layer and its ops against plain torch, eager and compiled, and against the memory's speed."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_plugin_sdk.bench.timing import Step, copy_rate, take_turns
from ds_plugin_sdk.nn import TransformerLayer
from ds_plugin_sdk.op_builder import load_kernels
from ds_plugin_sdk.ops import transformer

P = 0.1  # dropped
# Batch, tokens, hidden size, heads.
SIZES = {"small": (2, 64, 256, 4), "large": (8, 128, 1024, 16)}
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """One op, or the layer, in one size.

    Attributes:
        what: which; ``backward`` is that alone, ``forward+backward`` both; ``all ops`` for geometric means.
        size: ``small`` or ``large``, as in `SIZES`.
        dtype: of all tensors.
        threads: of torch.
        microseconds: median wall time of a call.
        times_copy: bytes that must be moved, over that time, in multiples of the rate of copying one large tensor here;
            None for the layer.
        times_eager: speed in multiples of torch's, eager.
        times_compiled: speed in multiples of that under torch.compile; None where that was not asked for.
    """

    what: str
    size: str
    dtype: str
    threads: int
    microseconds: float | None
    times_copy: float | None
    times_eager: float
    times_compiled: float | None


@dataclass(frozen=True)
class _Case:
    """What is compared: functions of the same tensors; gradients are taken of their results if there is a cotangent."""

    what: str
    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    tensors: Sequence[Tensor]
    moved: int = 0  # how often a tensor like the first must be read or written
    cotangent: Tensor | None = None


def run(compiled: bool = True, seconds: float = 1.0, threads: Sequence[int] = (1, 2)) -> list[Row]:
    """Measure every op and the layer; the implementations take turns, so that noise falls on all alike.

    Args:
        compiled: compare with torch.compile too, which takes some seconds for each row.
        seconds: time to spend on each row.
        threads: numbers of threads to measure with.
    """
    load_kernels("transformer", "cpu")
    before, rows = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            rate = copy_rate()
            for dtype in DTYPES:
                for size in SIZES:
                    found = [_measure(case, size, count, rate, compiled, seconds) for case in _cases(size, dtype)]
                    rows += found
                    rows += [_mean(found, "forward"), _mean(found, "backward")]
    finally:
        torch.set_num_threads(before)
    return rows


# ---------------------------------------------------------------------------------- cases


def _cases(size: str, dtype: torch.dtype) -> Iterator[_Case]:
    yield from _ops(*SIZES[size], dtype)
    for p in (0.0, P):
        yield from _layers(*SIZES[size], dtype, p)


def _ops(batch: int, tokens: int, hidden: int, heads: int, dtype: torch.dtype) -> Iterator[_Case]:
    """Each op beside the lines of torch that layers have in its place."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    seed = transformer.new_seed()
    x, residual, grad = (made(batch, tokens, hidden) for _ in range(3))
    bias, weight, norm_bias = (made(hidden) for _ in range(3))
    shape = (hidden,)
    yield from _both(
        "layer norm",
        lambda x, w, b: transformer.dropout_add_layer_norm(x, w, b)[0],
        lambda x, w, b: functional.layer_norm(x, shape, w, b),
        (x, weight, norm_bias),
        (2, 3),
        grad,
    )
    yield from _both(
        "bias, dropout, residual, layer norm",
        lambda x, r, c, w, b: transformer.dropout_add_layer_norm(x, w, b, r, bias=c, p=P, seed=seed)[0],
        lambda x, r, c, w, b: functional.layer_norm(r + functional.dropout(x + c, P), shape, w, b),
        (x, residual, bias, weight, norm_bias),
        (4, 4),
        grad,
    )
    inter, inter_bias = made(batch, tokens, 4 * hidden), made(4 * hidden)
    for name, tanh in (("tanh", True), ("erf", False)):
        approximate = "tanh" if tanh else "none"
        yield from _both(
            f"bias, gelu ({name})",
            lambda x, b, tanh=tanh: transformer.fused_bias_gelu(x, b, tanh=tanh),
            lambda x, b, approximate=approximate: functional.gelu(x + b, approximate=approximate),
            (inter, inter_bias),
            (2, 3),
            made(batch, tokens, 4 * hidden),
        )
    scores, mask = made(batch, heads, tokens, tokens), torch.zeros(batch, 1, 1, tokens, dtype=dtype)
    yield from _both(
        "mask, softmax, dropout",
        lambda s, m: transformer.masked_softmax_dropout(s, m, scale=0.125, p=P, seed=seed),
        lambda s, m: functional.dropout(functional.softmax(s * 0.125 + m, dim=-1), P),
        (scores, mask),
        (3, 3),
        made(batch, heads, tokens, tokens),
    )


def _both(
    what: str,
    ours: Callable[..., Any],
    torchs: Callable[..., Any],
    tensors: Sequence[Tensor],
    moved: tuple[int, int],
    grad: Tensor,
) -> Iterator[_Case]:
    """Forward and backward of an op, which move `moved` tensors like the first."""
    yield _Case(f"{what}, forward", ours, torchs, [tensor.detach() for tensor in tensors], moved[0])
    yield _Case(f"{what}, backward", ours, torchs, tensors, moved[1], grad.detach())


def _layers(batch: int, tokens: int, hidden: int, heads: int, dtype: torch.dtype, p: float) -> Iterator[_Case]:
    """BERT's layer; torch's own with the same formulas beside it."""
    ours = TransformerLayer(hidden, heads, attn_dropout=p, hidden_dropout=p, pre_layer_norm=False, dtype=dtype)
    gelu = functools.partial(functional.gelu, approximate="tanh")
    torchs = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, p, gelu, batch_first=True, dtype=dtype)
    x, grad = torch.randn(batch, tokens, hidden).to(dtype), torch.randn(batch, tokens, hidden).to(dtype)
    mask = torch.zeros(batch, 1, 1, tokens, dtype=dtype)
    full = mask.expand(batch, heads, tokens, tokens).reshape(-1, tokens, tokens)

    def call_ours(x: Tensor) -> Any:
        return ours(x, mask)

    def call_torchs(x: Tensor) -> Any:
        return torchs(x, src_mask=full)

    yield _Case(f"layer, p {p}, forward", call_ours, call_torchs, [x])
    yield _Case(f"layer, p {p}, forward+backward", call_ours, call_torchs, [x.requires_grad_()], 0, grad)


# ---------------------------------------------------------------------------------- measuring


def _measure(case: _Case, size: str, threads: int, rate: float, compiled: bool, seconds: float) -> Row:
    functions = {"ours": case.ours, "eager": case.torchs}
    if compiled:
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False  # the backward pass is run many times
        functions["compiled"] = torch.compile(case.torchs, dynamic=False)
    steps = {name: _step(case, function) for name, function in functions.items()}
    medians = take_turns(steps, seconds)
    first, median = case.tensors[0], medians["ours"]
    moved = case.moved * first.numel() * first.element_size()
    return Row(
        case.what,
        size,
        str(first.dtype).removeprefix("torch."),
        threads,
        median * 1e6,
        moved / median / 1e9 / rate if moved else None,
        medians["eager"] / median,
        medians["compiled"] / median if compiled else None,
    )


def _step(case: _Case, function: Callable[..., Any]) -> Step:
    """The forward pass without autograd; or the backward pass of an op alone; or both of the layer."""
    if case.cotangent is None:

        def forward() -> object:
            with torch.no_grad():
                return function(*case.tensors)

        return forward
    leaves = [tensor for tensor in case.tensors if tensor.requires_grad]
    if case.moved:
        result = function(*case.tensors)
        return lambda: torch.autograd.grad(result, leaves, case.cotangent, retain_graph=True)
    return lambda: torch.autograd.backward(function(*case.tensors), case.cotangent)


def _mean(rows: Sequence[Row], direction: str) -> Row:
    """The geometric means of the ops' rows in one direction."""
    ops = [row for row in rows if row.what.endswith(direction) and not row.what.startswith("layer,")]
    compiled = [row.times_compiled for row in ops if row.times_compiled is not None]
    return Row(
        f"all ops, {direction}",
        rows[0].size,
        rows[0].dtype,
        rows[0].threads,
        None,
        None,
        statistics.geometric_mean([row.times_eager for row in ops]),
        statistics.geometric_mean(compiled) if compiled else None,
    )
