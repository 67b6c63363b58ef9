"""Softmax of attention scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import LONG_ROW, MANY_COLUMNS, MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import softmax as ops

_TAILS = (1, 3, 15, 16, 17, 33, 100)


def _softmax(
    scores: Tensor, mask: Tensor | None, alibi: Tensor | None, scale: float, causal: bool, window: int
) -> tuple[Tensor]:
    queries, keys = scores.shape[2:]
    x = scores * scale
    x = x if mask is None else x + mask
    x = x if alibi is None else x + alibi
    distance = torch.arange(keys - queries, keys).unsqueeze(1) - torch.arange(keys)
    forbidden = (distance < 0) & causal | ((distance >= window) if window else torch.tensor(False))
    weights = torch.softmax(x.masked_fill(forbidden, -torch.inf), dim=-1)
    nothing = (forbidden | (x == -torch.inf)).all(dim=-1, keepdim=True)
    return (weights.masked_fill(nothing, 0.0),)


def _samples(make: Make) -> Iterator[Sample]:
    yield _sample("no keys", "empty", make.normal(2, 3, 4, 0))
    yield _sample("no queries", "empty", make.normal(2, 3, 0, 5))
    yield _sample("mask and alibi", "random", make.normal(2, 2, 3, 5), make.normal(2, 1, 1, 5), make.normal(1, 2, 1, 5))
    for keys in _TAILS:
        yield _sample(f"{keys} keys", "adversarial", make.normal(1, 2, 3, keys, scale=3.0), scale=0.3)
    for queries, window in ((7, 0), (3, 0), (1, 0), (7, 3), (9, 2)):
        label = f"causal, {queries} queries of 7 keys, window {window}"
        yield _sample(label, "adversarial", make.normal(2, 2, queries, 7), causal=True, window=window)
    masked = torch.zeros(2, 1, 4, 20)
    masked[0, 0, 1, 3:] = masked[1, 0, 2] = -torch.inf
    yield _sample("rows of -inf", "adversarial", make.normal(2, 3, 4, 20), masked)
    yield _sample(
        "a mask for each row", "random", make.normal(2, 3, 4, 20), make.normal(2, 3, 4, 20, dtype=torch.float32)
    )
    padding = torch.zeros(2, 1, 1, 150)
    padding[0, ..., :70] = padding[1, ..., 1:40] = -torch.inf
    yield _sample("padding on the left", "adversarial", make.normal(2, 2, 3, 150), padding)
    slopes = make.normal(2, 3, 1, 7)
    for mask in (make.normal(1, 1, 4, 7), make.normal(1, 3, 1, 7)):
        label = f"causal, a mask of {list(mask.shape)}"
        yield _sample(label, "adversarial", make.normal(2, 3, 4, 7), mask, slopes, causal=True, window=3)
    yield _sample("a window, not causal", "adversarial", make.normal(2, 2, 5, 7), window=2)
    yield _sample("large scores", "adversarial", make.normal(1, 2, 3, 40, scale=1e4))
    yield _sample("a prompt of 128", "real", make.normal(2, 12, 128, 128), causal=True, scale=0.125)
    yield _sample("one token of 1000", "real", make.normal(4, 12, 1, 1000), make.normal(4, 1, 1, 1000), scale=0.125)


def _large(make: Make) -> Iterator[Sample]:
    yield _sample(f"{MANY_ROWS} rows", "adversarial", make.normal(3, MANY_ROWS // 9, 3, 2), make.normal(3, 1, 3, 2))
    yield _sample(f"{MANY_COLUMNS} keys", "adversarial", make.normal(1, 2, 3, MANY_COLUMNS, scale=3.0))
    yield _sample(f"{LONG_ROW} keys", "adversarial", make.normal(1, 1, 2, LONG_ROW, scale=3.0))


def _sample(
    label: str, kind: Kind, scores: Tensor, mask: Tensor | None = None, alibi: Tensor | None = None, **options: Any
) -> Sample:
    defaults = {"scale": 1.0, "causal": False, "window": 0}
    return Sample(label, {"scores": scores, "mask": mask, "alibi": alibi, **defaults, **options}, kind)


def _random(make: Make) -> Mapping[str, Any]:
    batch, heads, queries, keys = make.size(4), make.size(6), make.size(30), make.size(2500)

    def added() -> Tensor | None:
        if make.chance():
            return None
        return make.normal(make.pick(1, batch), make.pick(1, heads), make.pick(1, queries), keys, dtype=dtype)

    dtype = make.pick(make.dtype, torch.float32)
    mask, alibi = added(), added()
    if mask is not None and make.chance():
        mask[..., make.size(max(keys, 1)) :] = -torch.inf
    scores = make.normal(batch, heads, queries, keys, scale=make.pick(1.0, 3.0, 30.0))
    options = {"causal": make.chance(), "window": make.pick(0, 0, 1, make.size()), "scale": make.pick(1.0, 0.125)}
    return _sample("", "random", scores, mask, alibi, **options).arguments


def _schema_arguments(arguments: Mapping[str, Any]) -> Sequence[Any]:
    return list(arguments.values())


_SOFTMAX = OpInfo(
    name="softmax",
    family="softmax",
    function=ops.softmax,
    formula=_softmax,
    samples=_samples,
    random=_random,
    # An error of the exponent's argument is relative to the result, and the argument is up to 4e4.
    rtol={torch.float32: 5e-6, torch.bfloat16: 2**-8 + 5e-6, torch.float16: 2**-11 + 5e-6},
    schema_arguments=_schema_arguments,
    large=_large,
)

OPS = (_SOFTMAX, dataclasses.replace(_SOFTMAX, name="softmax_", function=ops.softmax_, written=("scores",)))
