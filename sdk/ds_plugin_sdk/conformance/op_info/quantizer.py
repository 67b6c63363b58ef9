"""Grouped quantization to 8 and 4 bits.

Levels are whole numbers, which must be met exactly: in most samples each group's range is a power of two, so that no
product rounds in float32, and ties are ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import quantizer

_FORMATS = ((8, True), (8, False), (4, True), (4, False))


# ---- formulas --------------------------------------------------------------------------------------------------------
def _scale_and_offset(x: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Of one group: DeepSpeed's CUDA source, quantization_utils.h, Params."""
    if x.numel() == 0:
        return torch.ones(()).double(), torch.zeros(()).double()
    high, low = x.max(), x.min()  # of which NaN is one, and the other
    span = 2 * torch.maximum(high.abs(), low.abs()) if symmetric else high - low
    scale = torch.ones_like(span) if span == 0 else 2**bits / span
    return scale, torch.zeros_like(span) if symmetric else (high + low) / 2


def _levels(x: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor:
    exact = (x - offset) * scale
    whole = torch.round(torch.clamp(exact, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
    return torch.where(whole.isnan(), 0.0, whole)


def _bytes(levels: Tensor, bits: int) -> Tensor:
    """Levels as they lie in memory: a signed byte for each, or for two, the first in its upper half."""
    if bits == 8:
        return levels
    byte = 16 * levels[0::2] + levels[1::2] % 16
    return torch.where(byte > 127, byte - 256, byte)


def _levels_of(stored: Tensor, bits: int) -> Tensor:
    """Undoes `_bytes`."""
    byte = stored.flatten().double()
    if bits == 8:
        return byte
    halves = torch.stack((torch.floor(byte / 16), byte % 16), dim=1).flatten()
    return torch.where(halves >= 8, halves - 16, halves)


def _quantize_groups(groups: list[Tensor], bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    stored, params = [], []
    for x in groups:
        scale, offset = _scale_and_offset(x, bits, symmetric)
        stored.append(_bytes(_levels(x, scale, offset, bits), bits))
        params.append(1 / scale if symmetric else torch.stack((1 / scale, offset)))
    return torch.cat(stored), torch.stack(params).reshape(len(groups), -1)


def _groups(x: Tensor, count: int) -> list[Tensor]:
    return list(x.reshape(count, -1).unbind()) if x.numel() else [x.flatten()] * count


def _quantize(*, x: Tensor, groups: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    stored, params = _quantize_groups(_groups(x, groups), bits, symmetric)
    return stored.reshape(*x.shape[:-1], -1) if x.numel() else stored.reshape(x.shape), params


def _swizzle(
    *, x: Tensor, groups: int, bits: int, symmetric: bool, pipeline: int, nodes: int, devices_per_node: int
) -> tuple[Tensor, Tensor]:
    """Group by group, as swizzled_quantize.cu numbers its blocks."""
    partitions = nodes * devices_per_node
    run = groups // (partitions * pipeline)
    parts, placed = _groups(x, groups), dict[int, Tensor]()
    for z in range(partitions):
        for y in range(pipeline):
            slot = y * partitions + (z % devices_per_node) * nodes + z // devices_per_node
            for i in range(run):
                placed[slot * run + i] = parts[(z * pipeline + y) * run + i]
    return _quantize_groups([placed[slot] for slot in range(groups)], bits, symmetric)


def _dequantize_groups(levels: Tensor, params: Tensor, bits: int, symmetric: bool) -> Tensor:
    values = _levels_of(levels, bits).reshape(params.shape[0], -1) if levels.numel() else levels.new_zeros(1, 0)
    return values.double() * params[:, :1] + (0 if symmetric else params[:, 1:])


def _dequantize(*, levels: Tensor, params: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor]:
    values = _dequantize_groups(levels, params, bits, symmetric)
    return (values.reshape(*levels.shape[:-1], levels.shape[-1] * 8 // bits),)


def _reduce(
    *, levels: Tensor, params: Tensor, out_groups: int, devices: int, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor]:
    total = _dequantize_groups(levels, params, bits, symmetric).reshape(devices, -1).sum(dim=0)
    stored, out_params = _quantize_groups(_groups(total, out_groups), bits, symmetric)
    return stored.reshape(*levels.shape[:-1], levels.shape[-1] // devices), out_params


def _range(*, levels: Tensor, scale: Tensor, minimum: Tensor, group_size: int, bits: int) -> tuple[Tensor]:
    """inference/quantization/utils.py: q = (x - min) scale."""
    byte = levels.flatten().double()
    values = byte if bits == 8 else torch.stack((torch.floor(byte / 16), byte % 16), dim=1).flatten()
    return (values.reshape(scale.numel(), group_size) / scale.reshape(-1, 1) + minimum.reshape(-1, 1),)


def _fake(*, x: Tensor, noise: Tensor | None, groups: int, bits: int, symmetric: bool) -> tuple[Tensor]:
    """fake_quantizer.cu of DeepSpeed 0.18."""
    noises = [None] * groups if noise is None else _groups(noise, groups)
    results = [
        _fake_group(values, drawn, bits, symmetric) for values, drawn in zip(_groups(x, groups), noises, strict=True)
    ]
    return (torch.cat(results).reshape(x.shape) if x.numel() else x.clone(),)


def _fake_group(x: Tensor, noise: Tensor | None, bits: int, symmetric: bool) -> Tensor:
    if x.numel() == 0:
        return x
    low = torch.zeros_like(x.min()) if symmetric else x.min()
    span = 2 * x.abs().max() if symmetric else x.max() - low
    step = (span + 1e-5) / float(2**bits)
    exact = (x - low) / step
    whole = torch.round(exact) if noise is None else torch.floor(exact + noise)
    if symmetric:
        whole = torch.clamp(whole, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return whole * step + low


# ---- samples ---------------------------------------------------------------------------------------------------------
def _within(make: Make, groups: int, size: int, middle: float = 0.0) -> Tensor:
    """Groups whose values lie within 1 of `middle`, and of which each has both ends if it has two elements."""
    x = make.normal(groups, size, scale=0.5, dtype=torch.float32).clamp(-1, 1)
    x[:, -1:] = -1
    x[:, :1] = 1
    return (x + middle).to(make.dtype)


def _negative(make: Make, groups: int, size: int) -> Tensor:
    """The same about zero, with nothing above a half, and of which the last alone is -1."""
    x = _within(make, groups, size).clamp(-0.75, 0.5)
    x[:, -1:] = -1
    return x


def _ties(make: Make, groups: int, size: int, bits: int) -> Tensor:
    """Values half way between two levels of ranges that are powers of two, the last group all zero."""
    x = (make.integers(-128, 128, groups, size) + 0.5) / 128 if bits == 8 else make.integers(-16, 17, groups, size) / 16
    x[:, :1] = 1
    x = x * 2.0 ** torch.arange(groups).unsqueeze(1)
    x[-1] = 0
    return x.to(make.dtype)


def _each_one_number(make: Make, groups: int, size: int) -> Tensor:
    """Groups of one number each, of either sign, and a group of zeros."""
    numbers = torch.arange(groups) - groups // 2
    return numbers.unsqueeze(1).repeat(1, size).to(make.dtype)


def _next_to_nothing(make: Make, groups: int, size: int) -> Tensor:
    """The same as `_within`, so small that whatever is added to a range is more than the range."""
    return _within(make, groups, size) * 2.0 ** (-14 if make.dtype == torch.float16 else -40)


def _text(bits: int, symmetric: bool) -> str:
    return f"{bits} bits{'' if symmetric else ', asymmetric'}"


def _quantize_samples(make: Make) -> Iterator[Sample]:
    def sample(label: str, x: Tensor, groups: int, bits: int, symmetric: bool, kind: Kind) -> Sample:
        return Sample(label, {"x": x, "groups": groups, "bits": bits, "symmetric": symmetric}, kind)

    for bits, symmetric in _FORMATS:
        yield sample(f"empty, {_text(bits, symmetric)}", make.normal(0), 2, bits, symmetric, "empty")
    for bits, symmetric in _FORMATS:
        text = _text(bits, symmetric)
        for size in (2, 6, 16, 34, 130):
            x = _within(make, 3, size).reshape(1, -1)
            yield sample(f"groups of {size}, {text}", x, 3, bits, symmetric, "random")
        yield sample(f"ties, {text}", _ties(make, 4, 66, bits), 4, bits, True, "adversarial")
        if symmetric:
            yield sample(f"the largest is negative, {text}", _negative(make, 3, 40), 3, bits, True, "adversarial")
        yield sample(f"away from zero, {text}", _within(make, 3, 40, 2), 3, bits, False, "adversarial")
        yield sample(f"one number a group, {text}", _each_one_number(make, 3, 40), 3, bits, symmetric, "adversarial")
        yield sample(f"next to nothing, {text}", _next_to_nothing(make, 3, 40), 3, bits, symmetric, "adversarial")
    for size in (1, 3, 15, 17, 65):
        yield sample(f"groups of {size}", _within(make, 5, size).reshape(size, 5), 5, 8, True, "adversarial")
    yield sample("gpt2 mlp", _within(make, 288, 8192).view(768, -1), 288, 8, True, "real")


def _swizzle_samples(make: Make) -> Iterator[Sample]:
    def sample(x: Tensor, groups: int, layout: tuple[int, int, int], bits: int, symmetric: bool, kind: Kind) -> Sample:
        pipeline, nodes, devices = layout
        return Sample(
            f"{kind}, {pipeline} slices, {nodes} nodes, {devices} devices, {_text(bits, symmetric)}",
            {
                "x": x,
                "groups": groups,
                "bits": bits,
                "symmetric": symmetric,
                "pipeline": pipeline,
                "nodes": nodes,
                "devices_per_node": devices,
            },
            kind,
        )

    yield sample(make.normal(0), 4, (1, 2, 1), 4, True, "empty")
    for bits, symmetric in _FORMATS:
        for layout in ((1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 3), (2, 3, 2)):
            groups = 2 * math.prod(layout)
            x = _negative(make, groups, 10) if symmetric else _within(make, groups, 10, 2)
            yield sample(x, groups, layout, bits, symmetric, "random")
        yield sample(_each_one_number(make, 4, 10), 4, (1, 2, 1), bits, symmetric, "adversarial")
    yield sample(_within(make, 768, 768), 768, (1, 2, 4), 4, True, "real")


def _packed(make: Make, *shape: int) -> Tensor:
    return make.integers(-128, 128, *shape, dtype=torch.int8)


def _params(make: Make, groups: int, symmetric: bool) -> Tensor:
    steps = make.positive(groups, 1, scale=0.01, dtype=torch.float32)
    return steps if symmetric else torch.cat((steps, make.normal(groups, 1, dtype=torch.float32)), dim=1)


def _dequantize_samples(make: Make) -> Iterator[Sample]:
    def sample(label: str, levels: Tensor, groups: int, bits: int, symmetric: bool, kind: Kind) -> Sample:
        params = _params(make, groups, symmetric)
        arguments = {"levels": levels, "params": params, "bits": bits, "symmetric": symmetric, "dtype": make.dtype}
        return Sample(label, arguments, kind)

    yield sample("empty", _packed(make, 0), 1, 8, True, "empty")
    for bits, symmetric in _FORMATS:
        for size in (1, 3, 7, 16, 17, 65):
            yield sample(
                f"groups of {size} bytes, {_text(bits, symmetric)}",
                _packed(make, 3 * size),
                3,
                bits,
                symmetric,
                "random",
            )
    yield sample("gpt2 mlp", _packed(make, 768, 3072), 288, 8, True, "real")


def _reduce_samples(make: Make) -> Iterator[Sample]:
    def sample(
        label: str, shape: tuple[int, ...], groups: tuple[int, int, int], bits: int, symmetric: bool, kind: Kind
    ) -> Sample:
        in_groups, out_groups, devices = groups
        return Sample(
            label,
            {
                "levels": _packed(make, *shape),
                "params": _params(make, in_groups, symmetric),
                "out_groups": out_groups,
                "devices": devices,
                "bits": bits,
                "symmetric": symmetric,
            },
            kind,
        )

    yield sample("empty", (0,), (2, 1, 2), 4, True, "empty")
    for bits, symmetric in _FORMATS:
        # As many groups in the sum as each device sent, more, and less.
        for in_groups, out_groups, devices in ((4, 2, 2), (6, 6, 3), (12, 2, 2), (8, 1, 8)):
            label = f"{in_groups} groups of {devices} devices to {out_groups}, {_text(bits, symmetric)}"
            yield sample(label, (devices * 66,), (in_groups, out_groups, devices), bits, symmetric, "random")
    yield sample("gpt2 attention, 8 devices", (8 * 768 * 12,), (768, 96, 8), 4, True, "real")


def _range_samples(make: Make) -> Iterator[Sample]:
    def sample(label: str, groups: int, size: int, bits: int, kind: Kind) -> Sample:
        levels = make.integers(0, 256, groups, size * bits // 8, dtype=torch.uint8)
        scale, minimum = make.positive(groups, 1, scale=50), make.normal(groups, 1)
        arguments = {"levels": levels, "scale": scale, "minimum": minimum, "group_size": size, "bits": bits}
        return Sample(label, arguments, kind)

    yield sample("empty", 0, 8, 8, "empty")
    for bits in (8, 4):
        for size in (2, 8, 30, 34, 128):
            yield sample(f"groups of {size}, {bits} bits", 3, size, bits, "random")
    for bits in (8, 4):
        yield sample(f"opt projection, {bits} bits", 768 * 12, 64, bits, "real")


def _fake_samples(make: Make) -> Iterator[Sample]:
    def sample(label: str, x: Tensor, groups: int, bits: int, symmetric: bool, noisy: bool, kind: Kind) -> Sample:
        noise = torch.rand(x.shape, generator=make.generator) if noisy else None
        return Sample(label, {"x": x, "noise": noise, "groups": groups, "bits": bits, "symmetric": symmetric}, kind)

    yield sample("empty", make.normal(0), 1, 8, True, False, "empty")
    for bits, symmetric in (*_FORMATS, (16, True), (3, False)):
        for noisy in (False, True):
            text = f"{_text(bits, symmetric)}{', noise' if noisy else ''}"
            for size in (1, 5, 16, 33):
                yield sample(f"groups of {size}, {text}", make.normal(4, size), 4, bits, symmetric, noisy, "random")
    yield sample("zeros", make.normal(2, 8) * 0, 2, 8, False, False, "adversarial")
    yield sample("bert attention", make.normal(768, 768, scale=0.02), 12, 8, True, False, "real")


# ---- beyond a launch -------------------------------------------------------------------------------------------------
# Groups and their sizes: many, and long ones.
_MANY = 65_544
_LARGE = ((_MANY, 2), (8, 5000))


def _large_quantize(make: Make) -> Iterator[Sample]:
    for bits, (groups, size) in ((8, _LARGE[0]), (8, _LARGE[1]), (4, _LARGE[1])):
        arguments = {"x": _negative(make, groups, size), "groups": groups, "bits": bits, "symmetric": True}
        yield Sample(f"{groups} groups of {size}, {bits} bits", arguments, "adversarial")


def _large_swizzle(make: Make) -> Iterator[Sample]:
    for sample in _large_quantize(make):
        layout = {"pipeline": 1, "nodes": 2, "devices_per_node": 2}
        yield Sample(sample.label, {**sample.arguments, **layout}, sample.kind)


def _large_dequantize(make: Make) -> Iterator[Sample]:
    for groups, size in _LARGE:
        levels, params = _packed(make, groups, size), _params(make, groups, False)
        arguments = {"levels": levels, "params": params, "bits": 8, "symmetric": False, "dtype": make.dtype}
        yield Sample(f"{groups} groups of {size}", arguments, "adversarial")


def _large_reduce(make: Make) -> Iterator[Sample]:
    for groups, size in _LARGE:
        arguments = {
            "levels": _packed(make, groups * size),
            "params": _params(make, groups, True),
            "out_groups": groups // 2,
            "devices": 2,
            "bits": 8,
            "symmetric": True,
        }
        yield Sample(f"{groups} groups of {size}", arguments, "adversarial")


def _large_range(make: Make) -> Iterator[Sample]:
    for groups, size in _LARGE:
        levels = make.integers(0, 256, groups, size, dtype=torch.uint8)
        scale, minimum = make.positive(groups, 1, scale=50), make.normal(groups, 1)
        arguments = {"levels": levels, "scale": scale, "minimum": minimum, "group_size": size, "bits": 8}
        yield Sample(f"{groups} groups of {size}", arguments, "adversarial")


def _large_fake(make: Make) -> Iterator[Sample]:
    for groups, size in _LARGE:
        x = make.integers(-64, 65, groups, size).float() / 64  # between two levels no value is in the middle
        x[:, 0], x[:, 1] = -1, 1
        arguments = {"x": x.to(make.dtype), "noise": None, "groups": groups, "bits": 8, "symmetric": False}
        yield Sample(f"{groups} groups of {size}", arguments, "adversarial")


# ---- random calls ----------------------------------------------------------------------------------------------------
def _format(make: Make) -> tuple[int, bool]:
    return make.pick(*_FORMATS)


def _split(make: Make, groups: int, size: int) -> tuple[int, ...]:
    """A shape of as many elements as so many groups have, its last dimension even."""
    return make.pick((groups * size,), (1, groups * size), (groups, size), (groups, 1, size))


def _random_quantize(make: Make) -> Mapping[str, Any]:
    bits, symmetric = _format(make)
    groups, size = make.size(70, 1), make.size()
    groups = min(groups, max(1, 60_000 // max(size, 1)))
    size += size % 2 if bits == 4 else 0
    x = _within(make, groups, size, 0 if symmetric else make.pick(0, 2)).reshape(_split(make, groups, size))
    return {"x": x, "groups": groups, "bits": bits, "symmetric": symmetric}


def _random_swizzle(make: Make) -> Mapping[str, Any]:
    layout = {name: make.size(4, 1) for name in ("pipeline", "nodes", "devices_per_node")}
    groups, size = math.prod(layout.values()) * make.size(4, 1), 2 * make.size(100)
    bits, symmetric = _format(make)
    x = _within(make, groups, size).reshape(_split(make, groups, size))
    return {"x": x, "groups": groups, "bits": bits, "symmetric": symmetric, **layout}


def _random_dequantize(make: Make) -> Mapping[str, Any]:
    bits, symmetric = _format(make)
    groups, size = make.size(70, 1), make.size(800)
    return {
        "levels": _packed(make, *_split(make, groups, size)),
        "params": _params(make, groups, symmetric),
        "bits": bits,
        "symmetric": symmetric,
        "dtype": make.dtype,
    }


def _random_reduce(make: Make) -> Mapping[str, Any]:
    bits, symmetric = _format(make)
    devices, out_groups, in_groups, size = make.size(8, 1), make.size(8, 1), make.size(8, 1), make.size(100)
    columns = in_groups * out_groups * size * (1 if bits == 4 else make.pick(1, 2))
    return {
        "levels": _packed(make, devices * columns),
        "params": _params(make, devices * in_groups, symmetric),
        "out_groups": out_groups,
        "devices": devices,
        "bits": bits,
        "symmetric": symmetric,
    }


def _random_range(make: Make) -> Mapping[str, Any]:
    groups, size, bits = make.size(70), 2 * make.size(300, 1), make.pick(8, 4)
    return {
        "levels": make.integers(0, 256, groups, size * bits // 8, dtype=torch.uint8),
        "scale": make.positive(groups, 1, scale=50),
        "minimum": make.normal(groups, 1),
        "group_size": size,
        "bits": bits,
    }


def _random_fake(make: Make) -> Mapping[str, Any]:
    bits, symmetric = make.pick(*_FORMATS, (16, True), (3, False))
    groups, size = make.size(70, 1), make.size(800)
    x = make.normal(*_split(make, groups, size))
    noise = torch.rand(x.shape, generator=make.generator) if make.chance() else None
    return {"x": x, "noise": noise, "groups": groups, "bits": bits, "symmetric": symmetric}


_EXACT = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 1e-6)


def _describe(
    name: str,
    function: Callable[..., object],
    formula: Callable[..., tuple[Tensor, ...]],
    samples: Callable[[Make], Iterator[Sample]],
    random: Callable[[Make], Mapping[str, Any]],
    large: Callable[[Make], Iterator[Sample]],
) -> OpInfo:
    """An op that gives levels and params, whatever its input is: as exact as float32."""
    return OpInfo(
        name, "quantizer", function, formula, samples, random, rtol=_EXACT, atol=_EXACT, levels=True, large=large
    )


OPS = (
    _describe("quantize", quantizer.quantize, _quantize, _quantize_samples, _random_quantize, _large_quantize),
    _describe(
        "swizzle_quantize", quantizer.swizzle_quantize, _swizzle, _swizzle_samples, _random_swizzle, _large_swizzle
    ),
    _describe("quantized_reduce", quantizer.quantized_reduce, _reduce, _reduce_samples, _random_reduce, _large_reduce),
    OpInfo(
        "dequantize",
        "quantizer",
        quantizer.dequantize,
        _dequantize,
        _dequantize_samples,
        _random_dequantize,
        large=_large_dequantize,
    ),
    OpInfo(
        "dequantize_range",
        "quantizer",
        quantizer.dequantize_range,
        _range,
        _range_samples,
        _random_range,
        large=_large_range,
    ),
    OpInfo(
        "fake_quantize_",
        "quantizer",
        quantizer.fake_quantize_,
        _fake,
        _fake_samples,
        _random_fake,
        written=("x",),
        # A step of 16 bits: the last bit of a number and its noise may decide.
        atol=dict.fromkeys(_EXACT, 2**-13),
        levels=True,
        large=_large_fake,
    ),
)
