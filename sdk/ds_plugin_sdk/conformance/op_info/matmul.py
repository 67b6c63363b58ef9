"""Products of matrices in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import MANY_COLUMNS, MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops.matmul import addmm_

# Rows, columns, depth: around vectors, tiles of columns and of depth, and rows whose sums are in registers together.
# Most checks take the first: one that the CPU's tiles serve, which are not for thin matrices.
_SHAPES = ((41, 63, 127), (40, 40, 40), (1, 1, 1), (2, 33, 5), (52, 96, 128), (65, 97, 129), (70, 100, 515))
_REAL = ((520, 96, 1024), (512, 768, 768))


def _formula(sums: Tensor, a: Tensor, b: Tensor, beta: float) -> tuple[Tensor]:
    product = a.to(torch.float64) @ b.to(torch.float64)
    return (product if beta == 0 else product + beta * sums,)


def _sample(
    make: Make, label: str, kind: Kind, shape: tuple[int, int, int], layout: str = "nn", beta: float = 1.0
) -> Sample:
    """A matrix is transposed where the layout has a ``t``."""
    rows, columns, depth = shape
    a, b = (
        make.normal(*shape[::-1]).t() if turned == "t" else make.normal(*shape)
        for turned, shape in zip(layout, ((rows, depth), (depth, columns)), strict=True)
    )
    # Sums of size one, whatever their length.
    b.mul_(max(depth, 1) ** -0.5)
    return Sample(label, {"sums": make.normal(rows, columns), "a": a, "b": b, "beta": beta}, kind)


def _samples(make: Make) -> Iterator[Sample]:
    yield _sample(make, "no rows", "empty", (0, 5, 3))
    yield _sample(make, "no columns", "empty", (5, 0, 3))
    yield _sample(make, "no depth", "empty", (3, 5, 0), beta=0.5)
    for number, shape in enumerate(_SHAPES):
        for layout in ("nn", "nt", "tn", "tt"):
            yield _sample(make, f"{shape}, {layout}", "adversarial", shape, layout, (0.0, 1.0, -0.5)[number % 3])
    unread = _sample(make, "sums that are not read", "adversarial", (45, 43, 41), beta=0.0)
    unread.arguments["sums"].fill_(torch.nan)
    yield unread
    for shape in _REAL:
        yield _sample(make, f"{shape}, a turned", "real", shape, "tn")
        yield _sample(make, f"{shape}", "real", shape, "nt", 0.0)


def _large(make: Make) -> Iterator[Sample]:
    for layout in ("nn", "tt"):
        yield _sample(make, f"{MANY_ROWS} rows, {layout}", "adversarial", (MANY_ROWS, 40, 41), layout)
        yield _sample(make, f"{MANY_COLUMNS} columns, {layout}", "adversarial", (40, MANY_COLUMNS, 41), layout)
        yield _sample(make, f"{MANY_COLUMNS} deep, {layout}", "adversarial", (40, 41, MANY_COLUMNS), layout)


def _random(make: Make) -> Mapping[str, Any]:
    least = make.pick(0, 40)
    shape = make.size(300, least), make.size(300, least), make.size(1100, least)
    layout = make.pick("nn", "nt", "tn", "tt")
    return _sample(make, "", "random", shape, layout, make.pick(0.0, 1.0, 0.5)).arguments


OPS = (
    OpInfo(
        name="addmm_",
        family="matmul",
        function=addmm_,
        formula=_formula,
        samples=_samples,
        random=_random,
        dtypes=(torch.float32,),
        written=("sums",),
        # Sums are of size one, with terms of either sign.
        rtol={torch.float32: 1e-5},
        atol={torch.float32: 1e-5},
        large=_large,
    ),
)
