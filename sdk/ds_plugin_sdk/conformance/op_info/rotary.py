"""Rotary position embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import rotary as ops

# (batch, heads, tokens, head_dim), rotary_dim: whole heads and parts, around every vector width.
_SHAPES = (
    ((1, 1, 1, 2), 2),
    ((2, 3, 4, 5), 2),
    ((2, 3, 4, 6), 4),
    ((1, 2, 3, 40), 26),
    ((2, 1, 5, 64), 64),
    ((1, 2, 3, 80), 66),
    ((1, 2, 40, 256), 34),
)


def _rotary(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor]:
    half = cos.shape[-1]
    turned, rest = input[..., : 2 * half], input[..., 2 * half :]
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))  # type: ignore[no-untyped-call]  # torch gives it no type
    a, b = pairs.unbind(-1 if interleaved else -2)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    both = torch.stack([a * c - b * s, b * c + a * s], dim=-1 if interleaved else -2)
    return (torch.cat([both.flatten(-2), rest], dim=-1),)


def _samples(make: Make) -> Iterator[Sample]:
    yield _sample(make, "no tokens", "empty", (2, 3, 0, 8), 8, False)
    yield _sample(make, "no heads", "empty", (2, 0, 3, 8), 8, True)
    for interleaved in (False, True):
        layout = "interleaved" if interleaved else "halves"
        for shape, rotary_dim in _SHAPES:
            label = f"{layout}, {rotary_dim} of {list(shape)}"
            yield _sample(make, label, "adversarial", shape, rotary_dim, interleaved)
        yield _sample(make, f"{layout}, nothing turned", "adversarial", (1, 2, 3, 8), 0, interleaved)
    for interleaved in (False, True):
        label = f"angles that a batch has in common, {interleaved=}"
        yield _sample(make, label, "adversarial", (3, 2, 5, 24), 16, interleaved, common=True)
    yield _sample(make, "far along a sequence", "adversarial", (2, 2, 3, 32), 32, False, first=100_000)
    yield _sample(make, "llama", "real", (2, 32, 17, 128), 128, False)
    yield _sample(make, "gpt-j", "real", (2, 16, 9, 256), 64, True)


def _large(make: Make) -> Iterator[Sample]:
    yield _sample(make, f"{MANY_ROWS} tokens", "adversarial", (1, 1, MANY_ROWS, 4), 4, False)
    yield _sample(make, f"{MANY_ROWS} heads", "adversarial", (1, MANY_ROWS, 1, 4), 4, True)
    yield _sample(make, "a long head", "adversarial", (1, 2, 3, 2100), 2100, False)


def _sample(
    make: Make,
    label: str,
    kind: Kind,
    shape: tuple[int, ...],
    rotary_dim: int,
    interleaved: bool,
    first: int = 1,
    common: bool = False,
) -> Sample:
    batch, _, tokens, _ = shape
    positions = torch.arange(first, first + tokens) + 5 * torch.arange(1 if common else batch).unsqueeze(1)
    cos, sin = ops.angles(positions, rotary_dim)
    return Sample(label, {"input": make.normal(*shape), "cos": cos, "sin": sin, "interleaved": interleaved}, kind)


def _random(make: Make) -> Mapping[str, Any]:
    batch, heads, tokens, head_dim = make.size(4), make.size(9), make.size(50), make.size(260)
    rotary_dim = 2 * min(make.pick(make.size(130), head_dim // 2), head_dim // 2)
    first = make.pick(0, 1, 1000, 10**6)
    positions = first + torch.arange(tokens) + 5 * torch.arange(make.pick(1, batch)).unsqueeze(1)
    cos, sin = ops.angles(positions, rotary_dim)
    input = make.normal(batch, heads, tokens, head_dim)
    return {"input": input, "cos": cos, "sin": sin, "interleaved": make.chance()}


_ROTARY = OpInfo(
    name="rotary",
    family="rotary",
    function=ops.rotary,
    formula=_rotary,
    samples=_samples,
    random=_random,
    broadcasts=("input",),  # a head may be longer than what is turned
    large=_large,
)

OPS = (_ROTARY, dataclasses.replace(_ROTARY, name="rotary_", function=ops.rotary_, written=("input",)))
