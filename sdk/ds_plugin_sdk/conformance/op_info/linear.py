"""Linear layers with floating-point, int8 and int4 weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.activation import activate
from ds_plugin_sdk.conformance.op_info.op_info import MANY_COLUMNS, MANY_ROWS, Make, OpInfo, Sample
from ds_plugin_sdk.ops.linear import ACTIVATIONS, Activation, linear, quantize_weight

# Inputs, columns, rows: vector tails; one input and few, and as many as go to a matrix product.
_SHAPES = ((1, 16, 2), (2, 33, 18), (3, 100, 130), (7, 64, 66), (130, 96, 34))
_INT4_SHAPES = ((1, 128, 2), (3, 192, 130), (7, 64, 66), (130, 256, 34))
_REAL = ((1, 1024, 3072), (4, 1024, 1024), (150, 1024, 256))


def _formula(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    offsets: Tensor | None,
    residual: Tensor | None,
    activation: Activation,
    gated: bool,
) -> tuple[Tensor]:
    matrix = (_int4(weight) if weight.dtype == torch.uint8 else weight).to(torch.float64)
    if scales is not None:
        matrix = matrix * scales.repeat_interleave(matrix.shape[1] // scales.shape[1], dim=1)
        if offsets is not None:
            matrix = matrix + offsets.repeat_interleave(matrix.shape[1] // scales.shape[1], dim=1)
    hidden = input.to(torch.float64) @ matrix.T
    if bias is not None:
        hidden = hidden + bias
    half = hidden.shape[-1] // 2
    result = hidden[..., :half] * activate(hidden[..., half:], activation) if gated else activate(hidden, activation)
    return (result if residual is None else result + residual,)


def _int4(pairs: Tensor) -> Tensor:
    """Column c of a block of 64 is in bits 4 (c // 16) and up of the block's word c % 16, plus 8."""
    words = pairs.to(torch.int32).reshape(pairs.shape[0], pairs.shape[1] // 32, 16, 2)
    bits = words[..., 0] + 256 * words[..., 1]
    return torch.stack([(bits >> shift) % 16 - 8 for shift in (0, 4, 8, 12)], dim=2).flatten(1)


def _offsets(make: Make, scales: Tensor) -> Tensor:
    """Of zero points from 4 to 12, so that sums stay of size one; symmetric weights have 8."""
    return scales * (8 - make.integers(4, 13, *scales.shape).to(torch.float32))


def _sample(
    make: Make,
    label: str,
    kind: Any,
    shape: tuple[int, int, int],
    activation: Activation,
    gated: bool,
    groups: int,
    bits: Literal[4, 8] = 8,
    zeros: bool = False,
    bias: bool = True,
    residual: bool | None = None,
    batch: tuple[int, ...] = (),
) -> Sample:
    """A residual is added to what is gated unless it is said."""
    inputs, columns, rows = shape
    # Sums of size one, whatever their length.
    weight = make.normal(rows, columns, scale=max(columns, 1) ** -0.5, dtype=torch.float32)
    scales = None
    if groups:
        weight, scales = quantize_weight(weight, columns // groups, bits)
    else:
        weight = weight.to(make.dtype)
    out = rows // 2 if gated else rows
    arguments = {
        "input": make.normal(*batch, inputs, columns),
        "weight": weight,
        "bias": make.normal(rows) if bias else None,
        "scales": scales,
        "offsets": _offsets(make, scales) if zeros and scales is not None else None,
        "residual": make.normal(*batch, inputs, out) if (gated if residual is None else residual) else None,
        "activation": activation,
        "gated": gated,
    }
    return Sample(label, arguments, kind)


def _large(make: Make) -> Iterator[Sample]:
    for groups in (0, 1):
        text = ", int8" if groups else ""
        for shape in ((MANY_ROWS, 4, 2), (2, MANY_COLUMNS, 4), (1, 4, MANY_ROWS)):
            yield _sample(make, f"{shape}{text}", "adversarial", shape, "silu", False, groups)
    long = _sample(make, "a long sum of one sign", "adversarial", (1, 16_384, 2), "identity", False, 0, bias=False)
    input, weight = (torch.ones_like(long.arguments[name]) for name in ("input", "weight"))
    yield Sample(long.label, {**long.arguments, "input": input, "weight": weight / 128}, long.kind)


def _samples(make: Make) -> Iterator[Sample]:
    sample = functools.partial(_sample, make)
    yield sample("no inputs", "empty", (0, 16, 4), "identity", False, 0)
    yield sample("no columns", "empty", (3, 0, 4), "identity", False, 0)
    for number, shape in enumerate(_SHAPES):
        activation = ACTIVATIONS[number % len(ACTIVATIONS)]
        groups = 4 if shape[1] % 4 == 0 else 3
        yield sample(f"{shape}, {activation}", "adversarial", shape, activation, False, 0)
        yield sample(f"{shape}, gated {activation}", "adversarial", shape, activation, True, 0)
        yield sample(f"{shape}, int8, {activation}", "adversarial", shape, activation, False, groups)
    for number, shape in enumerate(_INT4_SHAPES):
        label, activation = f"{shape}, int4", ACTIVATIONS[number % len(ACTIVATIONS)]
        yield sample(label, "adversarial", shape, activation, number % 2 == 1, shape[1] // 64, 4)
        label = f"{label}, zero points"
        yield sample(label, "adversarial", shape, activation, number % 2 == 0, shape[1] // 64, 4, zeros=True)
    for groups in (0, 4):
        more, shape = ", int8" if groups else "", (7, 64, 66)
        yield sample(f"no bias{more}", "adversarial", shape, "silu", False, groups, bias=False)
        yield sample(f"a residual{more}", "adversarial", shape, "silu", False, groups, residual=True)
        yield sample(f"no residual{more}", "adversarial", shape, "silu", True, groups, residual=False)
        yield sample(f"a batch{more}", "adversarial", shape, "silu", True, groups, batch=(2,))
        vector = sample(f"a vector{more}", "adversarial", (1, *shape[1:]), "silu", False, groups)
        yield Sample(vector.label, {**vector.arguments, "input": vector.arguments["input"][0]}, vector.kind)
    large = sample("large inputs, int8", "adversarial", (3, 64, 18), "identity", False, 4, bias=False)
    of_one_sign = {"input": 300 * large.arguments["input"].abs(), "weight": large.arguments["weight"].abs()}
    yield Sample(large.label, {**large.arguments, **of_one_sign}, large.kind)
    for shape in _REAL:
        yield sample(f"{shape}", "real", shape, "gelu_tanh", False, 0)
        yield sample(f"{shape}, int8", "real", shape, "silu", True, shape[1] // 128)
        yield sample(f"{shape}, int4", "real", shape, "silu", True, shape[1] // 128, 4)
        yield sample(f"{shape}, int4, zero points", "real", shape, "silu", True, shape[1] // 128, 4, zeros=True)


def _random(make: Make) -> Mapping[str, Any]:
    columns, gated = make.size(1100), make.chance()
    bits: Literal[4, 8] = make.pick(4, 8)
    if bits == 4:
        columns = columns // 64 * 64
    rows = make.size(400) * (2 if gated else 1)
    leading = (*make.shape(make.pick(1, 2), elements=60)[:-1], make.size(40))
    weight = make.normal(rows, columns, scale=max(columns, 1) ** -0.5, dtype=torch.float32)
    scales: Tensor | None = None
    sizes = (64, 128, max(columns, 64)) if bits == 4 else (1, 2, 3, 8, 16, 32, 128, max(columns, 1))
    group = make.pick(*(size for size in sizes if columns % size == 0))
    if columns and make.chance():
        weight, scales = quantize_weight(weight, group, bits)
    out = rows // 2 if gated else rows
    return {
        "input": make.normal(*leading, columns),
        "weight": weight if scales is not None else weight.to(make.dtype),
        "bias": make.normal(rows) if make.chance() else None,
        "scales": scales,
        "offsets": _offsets(make, scales) if scales is not None and bits == 4 and make.chance() else None,
        "residual": make.normal(*leading, out) if make.chance() else None,
        "activation": make.pick(*ACTIVATIONS),
        "gated": gated,
    }


def _schema_arguments(arguments: Mapping[str, Any]) -> Sequence[Any]:
    names = ("input", "weight", "bias", "scales", "offsets", "residual")
    return [*(arguments[name] for name in names), ACTIVATIONS.index(arguments["activation"]), arguments["gated"]]


OPS = (
    OpInfo(
        name="linear",
        family="linear",
        function=linear,
        formula=_formula,
        samples=_samples,
        random=_random,
        schema_arguments=_schema_arguments,
        large=_large,
        finite=("scales", "offsets"),  # vectors are filled up with zeros
        # Sums are of size one, with terms of either sign; a matrix product rounds them, and its weights, on the way.
        rtol={torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9},
        atol={torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8},
        # Inputs may be rounded to 16 bits, whose last is 2**-15 of the largest of a group of columns. Weights of 8 bits
        # have lost a hundred times as much.
        quantized={torch.float32: 2**-10},
    ),
)
