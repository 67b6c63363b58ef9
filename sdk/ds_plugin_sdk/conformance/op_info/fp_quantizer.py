"""Grouped quantization to small floating-point numbers.

Stored bytes must be met exactly: the range of a group is a power of two times the format's, so that no product rounds
in float32, and ties are ties.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import fp_quantizer

# Bits, mantissa's bits, and the largest number, by DeepSpeed's fp_quantize.cpp.
_FORMATS = ((8, 3, 480.0), (8, 2, 114688.0), (12, 7, 510.0), (6, 2, 28.0), (4, 1, 6.0))
_LARGEST = {(bits, mantissa): largest for bits, mantissa, largest in _FORMATS}


# ---- formulas: one number at a time ----------------------------------------------------------------------------------
def _code(v: float, noise: float | None, bits: int, mantissa: int) -> int:
    """The number nearest to a value, ties away from 0."""
    sign = int(math.copysign(1, v) < 0) << (bits - 1)
    if v == 0 or not math.isfinite(v):
        return sign if v == 0 else 0
    bias = int(2 ** (bits - mantissa - 2)) - 1
    fraction, exponent = math.frexp(abs(v))  # of 0.5 and more
    steps = math.floor(fraction * 2 ** (mantissa + 1) + (0.5 if noise is None else noise))
    one = int(2**mantissa)
    if steps == 2 * one:
        steps, exponent = one, exponent + 1
    field = exponent - 1 + bias
    if field < 1:
        field, steps = 1, one
    return int(sign + field * one + steps - one)


def _number(code: int, bits: int, mantissa: int) -> float:
    sign = -1.0 if code >> (bits - 1) else 1.0
    magnitude = code % 2 ** (bits - 1)
    if magnitude == 0:
        return sign * 0.0
    bias = 2 ** (bits - mantissa - 2) - 1
    return float(sign * (1 + magnitude % 2**mantissa / 2**mantissa) * 2.0 ** ((magnitude >> mantissa) - bias))


def _quantize(*, x: Tensor, group_size: int, bits: int, mantissa_bits: int, noise: Tensor | None) -> tuple[Tensor]:
    rows = []
    noises = None if noise is None else noise.flatten().tolist()
    for group, values in enumerate(x.reshape(-1, group_size).tolist()):
        largest = math.nan if any(map(math.isnan, values)) else max(map(abs, values))
        factor = 1.0 if largest == 0 else _LARGEST[bits, mantissa_bits] / largest
        stream = 0
        for i, value in enumerate(values):
            drawn = None if noises is None else noises[group * group_size + i]
            stream |= _code(value * factor, drawn, bits, mantissa_bits) << (i * bits)
        scale = struct.pack("<f", largest / _LARGEST[bits, mantissa_bits])
        rows.append(list(stream.to_bytes(group_size * bits // 8, "little") + scale))
    return (torch.tensor(rows, dtype=torch.float64).reshape(len(rows), group_size * bits // 8 + 4),)


def _dequantize(*, stored: Tensor, group_size: int, bits: int, mantissa_bits: int, dtype: torch.dtype) -> tuple[Tensor]:
    rows = []
    for row in stored.tolist():
        stream = int.from_bytes(bytes(row[:-4]), "little")
        (scale,) = struct.unpack("<f", bytes(row[-4:]))
        codes = (stream >> (i * bits) & (2**bits - 1) for i in range(group_size))
        rows.append([_number(code, bits, mantissa_bits) * scale for code in codes])
    return (torch.tensor(rows, dtype=torch.float64).reshape(len(rows), group_size),)


# ---- calls -----------------------------------------------------------------------------------------------------------
def _ranged(x: Tensor, group_size: int, largest: float) -> Tensor:
    """Values whose group has a range of `largest` times a power of two."""
    groups = x.reshape(-1, group_size)
    top = largest * 2.0 ** -math.ceil(math.log2(largest))  # below 1
    groups = groups.clamp(-top, top)
    groups[:, group_size // 2] = top
    groups[1::2, group_size // 2] = -top
    return groups.reshape(x.shape)


def _in_order(samples: Iterable[Sample]) -> list[Sample]:
    """The empty ones first, those of real models last."""
    return sorted(samples, key=lambda sample: {"empty": 0, "real": 2}.get(sample.kind, 1))


def _quantize_samples(make: Make) -> Iterator[Sample]:
    yield from _in_order(sample for form in _FORMATS for sample in _samples_of(make, *form))


def _samples_of(make: Make, bits: int, mantissa: int, largest: float) -> Iterator[Sample]:
    def sample(label: str, kind: Kind, x: Tensor, group_size: int, noise: Tensor | None = None) -> Sample:
        arguments = {"x": x, "group_size": group_size, "bits": bits, "mantissa_bits": mantissa, "noise": noise}
        return Sample(f"{bits} bits with {mantissa}, {label}", arguments, kind)

    def random(*shape: int, group_size: int) -> Tensor:
        return _ranged(make.normal(*shape, scale=0.25), group_size, largest)

    yield sample("no elements", "empty", make.normal(0, 8), 8)
    yield sample("groups of 8", "random", random(5, 8, group_size=8), 8)
    yield sample("three dimensions", "random", random(2, 3, 40, group_size=24), 24)
    noise = make.integers(0, 256, 4, 16, dtype=torch.float32) / 256
    yield sample("stochastic", "random", random(4, 16, group_size=16), 16, noise)
    steps = torch.arange(64) / 32 * 2.0 ** -make.integers(0, 7, 64).float()
    ties = _ranged(steps.to(make.dtype), 64, largest)
    yield sample("ties", "adversarial", torch.stack((ties, -ties)), 64)
    small = _ranged((2.0 ** -torch.arange(24)).to(make.dtype), 24, largest)
    yield sample("powers of two", "adversarial", torch.stack((small, -small)), 24)
    yield sample("zeros", "adversarial", torch.zeros(3, 16, dtype=make.dtype), 8)
    least = 2.0 ** (-6 if make.dtype == torch.float16 else -40)
    yield sample("next to nothing", "adversarial", random(3, 16, group_size=16) * least, 16)
    yield sample("32 rows of 256", "real", random(32, 256, group_size=128), 128)


# Groups and their sizes: many, and long ones.
_LARGE = ((MANY_ROWS, 8), (3, 5000))


def _large_quantize(make: Make) -> Iterator[Sample]:
    for groups, size in _LARGE:
        x = _ranged(make.normal(groups, size, scale=0.25), size, 480.0)
        arguments = {"x": x, "group_size": size, "bits": 8, "mantissa_bits": 3, "noise": None}
        yield Sample(f"{groups} groups of {size}", arguments, "adversarial")


def _large_dequantize(make: Make) -> Iterator[Sample]:
    for groups, size in _LARGE:
        yield Sample(f"{groups} groups of {size}", _stored(make, groups, size, 8, 3), "adversarial")


def _random_quantize(make: Make) -> Mapping[str, Any]:
    bits, mantissa, largest = make.pick(*_FORMATS)
    groups, group_size = make.size(20), 8 * make.size(30, 1)
    x = _ranged(make.normal(groups, group_size, scale=0.25), group_size, largest)
    noise = make.integers(0, 256, *x.shape, dtype=torch.float32) / 256 if make.chance() else None
    return {"x": x, "group_size": group_size, "bits": bits, "mantissa_bits": mantissa, "noise": noise}


def _stored(make: Make, groups: int, group_size: int, bits: int, mantissa: int) -> dict[str, Any]:
    numbers = make.integers(0, 256, groups, group_size * bits // 8, dtype=torch.uint8)
    scales = make.positive(groups, scale=2**-7, dtype=torch.float32).view(torch.uint8).reshape(groups, 4)
    return {
        "stored": torch.cat((numbers, scales), dim=1),
        "group_size": group_size,
        "bits": bits,
        "mantissa_bits": mantissa,
        "dtype": make.dtype,
    }


def _random_dequantize(make: Make) -> Mapping[str, Any]:
    bits, mantissa, _ = make.pick(*_FORMATS)
    return _stored(make, make.size(20), 8 * make.size(30, 1), bits, mantissa)


def _dequantize_samples(make: Make) -> Iterator[Sample]:
    def sample(label: str, kind: Kind, groups: int, group_size: int, bits: int, mantissa: int) -> Sample:
        arguments = _stored(make, groups, group_size, bits, mantissa)
        return Sample(f"{bits} bits with {mantissa}, {label}", arguments, kind)

    def samples() -> Iterator[Sample]:
        for bits, mantissa, _ in _FORMATS:
            yield sample("no groups", "empty", 0, 8, bits, mantissa)
            yield sample("groups of 8", "random", 5, 8, bits, mantissa)
            yield sample("groups of 40", "adversarial", 3, 40, bits, mantissa)
            yield sample("64 rows of 128", "real", 64, 128, bits, mantissa)

    yield from _in_order(samples())


OPS = (
    OpInfo(
        name="fp_quantize",
        family="fp_quantizer",
        function=fp_quantizer.fp_quantize,
        formula=_quantize,
        samples=_quantize_samples,
        random=_random_quantize,
        large=_large_quantize,
        schema_arguments=lambda a: (a["x"], a["noise"], a["group_size"], a["bits"], a["mantissa_bits"]),
        levels=True,
        nan=False,  # a NaN's bytes are those of the group's scale, of which there are many; tests/ops has them
    ),
    OpInfo(
        name="fp_dequantize",
        family="fp_quantizer",
        function=fp_quantizer.fp_dequantize,
        formula=_dequantize,
        samples=_dequantize_samples,
        random=_random_dequantize,
        large=_large_dequantize,
    ),
)
