"""Sparse attention at 4096 tokens against dense attention: time, and the most memory that torch holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ds_plugin_sdk.bench.timing import Step, take_turns
from ds_plugin_sdk.nn import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
)

HEADS, LENGTH, WIDTH = 4, 4096, 64
PATTERNS: dict[str, SparsityConfig] = {
    "fixed": FixedSparsityConfig(HEADS, attention="unidirectional"),
    "variable": VariableSparsityConfig(HEADS),
    "bigbird": BigBirdSparsityConfig(HEADS),
    "bigbird, blocks of 64": BigBirdSparsityConfig(HEADS, 64),
    "bslongformer": BSLongformerSparsityConfig(HEADS),
    "local": LocalSlidingWindowSparsityConfig(HEADS),
}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One way to attend, batch 1, 4 heads of 64, 4096 tokens.

    Attributes:
        dtype: of queries, keys and values.
        attention: a pattern with its blocks of 16 tokens unless said; or torch's SDPA, over all keys, or over those of
            BigBird by a mask.
        blocks_percent: share of blocks that the layout has.
        forward_ms: median time of a forward pass.
        both_ms: median time of forward and backward.
        forward_times_dense: speed of the forward pass, in multiples of SDPA's over all keys.
        both_times_dense: speed of both passes, in the same multiples.
        memory_mib: the most that torch held beyond the arguments, in both passes.
    """

    dtype: str
    attention: str
    blocks_percent: float
    forward_ms: float
    both_ms: float
    forward_times_dense: float
    both_times_dense: float
    memory_mib: float


def run(seconds: float = 20.0) -> list[Row]:
    """Measure all patterns; they take turns with dense attention.

    Args:
        seconds: time to spend on the passes of each dtype, forward and both.
    """
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, cotangent = (torch.randn(1, HEADS, LENGTH, WIDTH).to(dtype) for _ in range(4))
        qkv = [each.requires_grad_() for each in (q, k, v)]
        ways = _ways()
        both = {name: _both(attend, qkv, cotangent) for name, (attend, _) in ways.items()}
        forward_medians = take_turns({name: _forward(attend, qkv) for name, (attend, _) in ways.items()}, seconds)
        both_medians = take_turns(both, seconds)
        dense = next(iter(ways))
        rows += [
            Row(
                str(dtype).removeprefix("torch."),
                name,
                100 * share,
                forward_medians[name] * 1e3,
                both_medians[name] * 1e3,
                forward_medians[dense] / forward_medians[name],
                both_medians[dense] / both_medians[name],
                peak_bytes(both[name]) / 2**20,
            )
            for name, (_, share) in ways.items()
        ]
    return rows


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


def _ways() -> dict[str, tuple[Attention, float]]:
    """Ways to attend, dense first, and the share of blocks that they have."""
    sparse = {name: SparseSelfAttention(config, max_seq_length=LENGTH) for name, config in PATTERNS.items()}
    layout = sparse["bigbird"].master_layout
    seen = layout.bool().repeat_interleave(16, dim=1).repeat_interleave(16, dim=2)
    return {
        "SDPA": (scaled_dot_product_attention, 1.0),
        "SDPA, masked": (lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=seen), _share(layout)),
        **{name: (module, _share(module.master_layout)) for name, module in sparse.items()},
    }


def _share(layout: Tensor) -> float:
    return float(layout.double().mean())


def _forward(attend: Attention, qkv: list[Tensor]) -> Step:
    def step() -> None:
        with torch.no_grad():
            attend(*qkv)

    return step


def _both(attend: Attention, qkv: list[Tensor], cotangent: Tensor) -> Step:
    return lambda: torch.autograd.grad(attend(*qkv), qkv, cotangent)
