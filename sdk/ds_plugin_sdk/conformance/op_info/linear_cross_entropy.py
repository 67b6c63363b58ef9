"""Cross entropy of a linear layer's outputs.

Where a device multiplies in 16 bits, logits are rounded to them. So the samples in 16 bits are small multiples of 1/4,
whose products are exact: their losses are those of float32 on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.cross_entropy import DEFAULTS, IGNORED, OPTIONS, losses, targets
from ds_plugin_sdk.conformance.op_info.op_info import MANY_COLUMNS, MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import linear_cross_entropy as ops


def _loss(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any) -> tuple[Tensor]:
    counted = target != options["ignore_index"]
    logits = input[counted] @ weight.t()
    logits = logits if bias is None else logits + bias
    # A sum of nothing depends on the arguments too.
    nothing = 0.0 * (input.nan_to_num(0, 0, 0).sum() + weight.nan_to_num(0, 0, 0).sum())
    nothing = nothing if bias is None else nothing + 0.0 * bias.nan_to_num(0, 0, 0).sum()
    return (losses(logits, target[counted], **options).sum() + nothing,)


def _samples(make: Make) -> Iterator[Sample]:
    yield _sample(make, "no rows", "empty", (0, 4, 5))
    yield _sample(make, "no columns", "empty", (3, 4, 0), torch.full((3,), IGNORED))
    yield _sample(make, "three rows", "random", (3, 4, 5), bias=True)
    yield _sample(make, "nothing to multiply", "adversarial", (4, 0, 5))
    yield _sample(make, "no bias", "random", (7, 6, 33))
    for label, options in OPTIONS.items():
        yield _sample(make, label, "random", (6, 8, 17), bias=True, **options)
    yield _sample(make, "all ignored", "adversarial", (3, 4, 5), torch.full((3,), IGNORED), bias=True)
    yield _sample(make, "none ignored", "random", (5, 4, 6), make.integers(0, 6, 5))
    yield _sample(make, "a column is ignored", "adversarial", (9, 4, 3), make.integers(0, 3, 9), ignore_index=1)
    yield _sample(make, "several chunks", "random", (300, 4, 40_000), bias=True, label_smoothing=0.1, z_loss=1e-2)
    yield _sample(make, "a vocabulary of 8192", "real", (64, 96, 8192))


def _large(make: Make) -> Iterator[Sample]:
    yield _sample(make, f"{MANY_ROWS} rows", "adversarial", (MANY_ROWS, 3, 4))
    yield _sample(make, f"{MANY_COLUMNS} columns", "adversarial", (3, 4, MANY_COLUMNS))


def _sample(
    make: Make,
    label: str,
    kind: Kind,
    sizes: Sequence[int],
    target: Tensor | None = None,
    bias: bool = False,
    **options: Any,
) -> Sample:
    rows, hidden, columns = sizes
    exact = make.dtype != torch.float32

    def made(*shape: int) -> Tensor:
        if exact:
            return (make.integers(-2, 3, *shape) / 4).to(make.dtype)
        return make.normal(*shape, scale=hidden**-0.25 if hidden else 1.0)

    arguments = {
        "input": made(rows, hidden),
        "weight": made(columns, hidden),
        "target": targets(make, rows, columns) if target is None else target,
        "bias": made(columns) if bias else None,
    }
    return Sample(label, {**arguments, **DEFAULTS, **options}, kind)


def _random(make: Make) -> Mapping[str, Any]:
    sizes = make.size(60), make.size(64), make.size(2000, 1)
    options: Mapping[str, Any] = make.pick({}, *OPTIONS.values())
    return _sample(make, "", "random", sizes, bias=make.chance(), **options).arguments


def _schema_arguments(arguments: Mapping[str, Any]) -> Sequence[Any]:
    return [*arguments.values(), True, True, arguments["bias"] is not None]


OPS = (
    OpInfo(
        name="linear_cross_entropy",
        family="linear_cross_entropy",
        function=ops.linear_cross_entropy,
        formula=_loss,
        samples=_samples,
        random=_random,
        differentiable=("input", "weight", "bias"),
        # The loss is float32 whatever the arguments are.
        rtol={torch.float32: 5e-6, torch.bfloat16: 2**-8 + 5e-6, torch.float16: 2**-11 + 5e-6},
        atol={torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5},
        # Logits' gradients are rounded too where products are in 16 bits.
        gradient_rtol={torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9},
        gradient_atol={torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9},
        schema_arguments=_schema_arguments,
        large=_large,
        indices={"target": lambda arguments: arguments["weight"].shape[0]},
    ),
)
