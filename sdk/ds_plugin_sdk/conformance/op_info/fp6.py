"""Weights of six bits. Packed bytes must be met exactly."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import fp6


# ---- formulas: one number at a time, as Xia et al. 2024 define it ----------------------------------------------------
def _code(x: float) -> int:
    """Sign, exponent with a bias of 3, and mantissa of a number, cut off."""
    magnitude, mantissa = abs(x), 0
    exponent = 0
    while exponent < 7 and magnitude >= 2.0 ** (exponent + 1 - 3):
        exponent += 1
    below = 0.0 if exponent == 0 else 2.0 ** (exponent - 3)
    mantissa = int((magnitude - below) / 2.0 ** (max(exponent, 1) - 3) * 4)
    return 32 * int(x < 0) + 4 * exponent + mantissa


def _number(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 32 else 1.0, code >> 2 & 7, code & 3
    return sign * (mantissa / 16 if exponent == 0 else (1 + mantissa / 4) * 2.0 ** (exponent - 3))


def _pack(*, weight: Tensor) -> tuple[Tensor, Tensor]:
    codes = [_code(x) for x in weight.flatten().tolist()]
    upper = [sum((code >> 4) << 2 * j for j, code in enumerate(codes[i : i + 4])) for i in range(0, len(codes), 4)]
    lower = [sum((code & 15) << 4 * j for j, code in enumerate(codes[i : i + 2])) for i in range(0, len(codes), 2)]
    return torch.tensor(upper).double(), torch.tensor(lower).double()


def _linear(*, input: Tensor, weight_2bit: Tensor, weight_4bit: Tensor, scales: Tensor) -> tuple[Tensor]:
    elements = scales.numel() * input.shape[-1]
    numbers = [
        _number(int(weight_2bit[i // 4]) >> 2 * (i % 4) << 4 & 48 | int(weight_4bit[i // 2]) >> 4 * (i % 2) & 15)
        for i in range(elements)
    ]
    weight = torch.tensor(numbers, dtype=input.dtype).reshape(scales.numel(), input.shape[-1])
    return (input @ (weight * scales.unsqueeze(1)).t(),)


# ---- samples ---------------------------------------------------------------------------------------------------------
def _pack_samples(make: Make) -> Iterator[Sample]:
    def sample(label: str, kind: Kind, weight: Tensor) -> Sample:
        return Sample(label, {"weight": weight}, kind)

    every = torch.tensor([_number(code) for code in range(64) if code != 32])  # and no zero but one
    yield sample("no outputs", "empty", make.normal(0, 8))
    yield sample("between 1 and 4", "random", make.signed(3, 8, scale=2))
    yield sample("every number", "adversarial", torch.cat([every, every[:1]]).reshape(8, 8).to(make.dtype))
    last = torch.nextafter(every[1:29], torch.zeros(())).clamp(min=1 / 16)
    yield sample("just below a number", "adversarial", last.reshape(7, 4).to(make.dtype))
    yield sample("256 outputs of 64", "real", make.signed(256, 64, scale=2))


def _linear_sample(make: Make, label: str, kind: Kind, *leading: int, inputs: int, outputs: int) -> Sample:
    packed = {
        f"weight_{bits}bit": make.integers(0, 256, outputs * inputs * bits // 8, dtype=torch.uint8) for bits in (2, 4)
    }
    scales = make.positive(outputs, scale=2**-5)
    return Sample(label, {"input": make.normal(*leading, inputs), **packed, "scales": scales}, kind)


def _large_pack(make: Make) -> Iterator[Sample]:
    yield Sample(f"{MANY_ROWS} outputs", {"weight": make.signed(MANY_ROWS, 4, scale=2)}, "adversarial")
    yield Sample("5000 inputs", {"weight": make.signed(3, 5000, scale=2)}, "adversarial")


def _large_linear(make: Make) -> Iterator[Sample]:
    yield _linear_sample(make, f"{MANY_ROWS} tokens", "adversarial", MANY_ROWS, inputs=4, outputs=4)
    yield _linear_sample(make, f"{MANY_ROWS} outputs", "adversarial", 1, inputs=4, outputs=MANY_ROWS)
    yield _linear_sample(make, "1100 inputs", "adversarial", 2, inputs=1100, outputs=4)


def _linear_samples(make: Make) -> Iterator[Sample]:
    sample = functools.partial(_linear_sample, make)
    yield sample("no tokens", "empty", 0, inputs=8, outputs=4)
    yield sample("one token", "random", 1, inputs=8, outputs=3)
    yield sample("two dimensions of tokens", "random", 2, 3, inputs=12, outputs=5)
    yield sample("one input", "adversarial", 7, inputs=1, outputs=4)
    yield sample("256 outputs of 64", "real", 5, inputs=64, outputs=256)


def _random_pack(make: Make) -> Mapping[str, Any]:
    outputs, inputs = make.size(20), make.size(60) // 4 * 4
    return {"weight": make.signed(outputs, inputs, scale=make.pick(0.125, 1, 14))}


def _random_linear(make: Make) -> Mapping[str, Any]:
    *leading, inputs = make.shape(make.pick(1, 2, 3), elements=500)
    inputs, outputs = min(inputs, 64), make.size(30) // 4 * 4
    packed = {
        f"weight_{bits}bit": make.integers(0, 256, outputs * inputs * bits // 8, dtype=torch.uint8) for bits in (2, 4)
    }
    return {"input": make.normal(*leading, inputs), **packed, "scales": make.positive(outputs, scale=2**-5)}


OPS = (
    OpInfo(
        name="fp6_pack",
        family="fp6",
        function=fp6.fp6_pack,
        formula=_pack,
        samples=_pack_samples,
        random=_random_pack,
        large=_large_pack,
        dtypes=(torch.float16,),
        nan=False,  # rejected: six bits have none
    ),
    OpInfo(
        name="fp6_linear",
        family="fp6",
        function=fp6.fp6_linear,
        formula=_linear,
        samples=_linear_samples,
        random=_random_linear,
        large=_large_linear,
        # Sums of up to 64 products of size 1 in float32.
        atol={torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5},
    ),
)
