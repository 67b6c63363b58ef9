"""Sparse attention at 4096 tokens against dense attention: time, and the most memory that torch holds."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ds_plugin_sdk.bench.timing import Case, Step
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


def cases(dtype: torch.dtype, compile: bool) -> Iterator[Case]:
    """The patterns, and torch's SDPA with BigBird's layout as a mask, against SDPA over all keys, or all earlier ones.

    A row's name has the share of blocks that are computed; the first is SDPA over all keys itself. `compile` adds
    nothing: FlexAttention has no backward pass on CPUs.
    """
    q, k, v, cotangent = (torch.randn(1, HEADS, LENGTH, WIDTH).to(dtype) for _ in range(4))
    qkv = [each.requires_grad_() for each in (q, k, v)]
    for what, attend in _ways().items():
        peers = {"SDPA": scaled_dot_product_attention}
        if what.startswith("fixed"):  # which sees no later keys
            peers["SDPA, causal"] = functools.partial(scaled_dot_product_attention, is_causal=True)
        forward = {name: _forward(peer, qkv) for name, peer in peers.items()}
        both = {name: _both(peer, qkv, cotangent) for name, peer in peers.items()}
        yield Case(what, "forward", _forward(attend, qkv), forward)
        yield Case(what, "forward+backward", _both(attend, qkv, cotangent), both, grad=True, peak=True)


def _ways() -> dict[str, Attention]:
    """Ways to attend, dense first, and the share of blocks that they have."""
    random.seed(0)  # in every process the same rows
    sparse = {name: SparseSelfAttention(config, max_seq_length=LENGTH) for name, config in PATTERNS.items()}
    layout = sparse["bigbird"].master_layout
    seen = layout.bool().repeat_interleave(16, dim=1).repeat_interleave(16, dim=2)
    return {
        "SDPA, all keys": scaled_dot_product_attention,
        "SDPA, BigBird as a mask": lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=seen),
        **{f"{name}, {_share(module):.1f} %": module for name, module in sparse.items()},
    }


def _share(attention: SparseSelfAttention) -> float:
    return 100 * float(attention.master_layout.double().mean())


def _forward(attend: Attention, qkv: list[Tensor]) -> Step:
    return lambda: attend(*qkv)


def _both(attend: Attention, qkv: list[Tensor], cotangent: Tensor) -> Step:
    return lambda: torch.autograd.grad(attend(*qkv), qkv, cotangent)
