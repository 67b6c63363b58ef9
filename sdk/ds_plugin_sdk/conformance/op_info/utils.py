"""Tensors as one run of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import Make, OpInfo, Sample
from ds_plugin_sdk.ops import utils


def _flatten(*, tensors: list[Tensor]) -> tuple[Tensor]:
    return (torch.cat([tensor.reshape(-1) for tensor in tensors]),)


def _samples(make: Make) -> Iterator[Sample]:
    yield Sample("empty", {"tensors": [make.normal(0), make.normal(3, 0)]}, "empty")
    yield Sample("one", {"tensors": [make.normal(5)]}, "adversarial")
    yield Sample("several", {"tensors": [make.normal(3, 4), make.normal(), make.normal(0), make.normal(17)]})
    wide = [make.integers(-(2**60), 2**60, size) for size in (3, 17)]
    yield Sample("int64", {"tensors": wide}, "adversarial")
    yield Sample("gpt2 attention", {"tensors": [make.normal(768), make.normal(768, 2304), make.normal(2304)]}, "real")


def _large(make: Make) -> Iterator[Sample]:
    yield Sample("700 tensors", {"tensors": [make.normal(1 + i % 5) for i in range(700)]}, "adversarial")
    yield Sample("1,100,001 elements", {"tensors": [make.normal(1_100_001)]}, "adversarial")


def _random(make: Make) -> Mapping[str, Any]:
    return {"tensors": [make.normal(*make.shape()) for _ in range(make.size(7, 1))]}


OPS = (
    OpInfo(
        name="flatten",
        family="utils",
        function=utils.flatten,
        formula=_flatten,
        samples=_samples,
        random=_random,
        large=_large,
        rtol=dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0.0),
        atol=dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0.0),
        any_dtype=("tensors",),
    ),
)
