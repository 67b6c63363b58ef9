"""Activations with their bias, and gated activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import MANY_COLUMNS, MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import activation as ops

# Around every vector width; more than one share of work.
_SHAPES = ((1, 1), (2, 3), (3, 15), (2, 16), (2, 17), (3, 2, 65), (70, 257))


def activate(x: Tensor, activation: str) -> Tensor:
    """By formulas that lose nothing where a result is much smaller than its input, and have gradients everywhere."""
    if activation == "relu":
        return x.clamp(min=0)
    if activation == "gelu":
        return x / 2 * torch.erfc(-x / 2**0.5)
    if activation == "gelu_tanh":  # x/2 (1 + tanh u), which loses nothing where tanh is near -1
        return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return x * torch.sigmoid(x) if activation == "silu" else x


def _bias_activation(input: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor]:
    return (activate(input if bias is None else input + bias, activation),)


def _gated_activation(input: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor]:
    first, second = (input if bias is None else input + bias).chunk(2, dim=-1)
    return (first * activate(second, activation),)


def _samples(make: Make) -> Iterator[Sample]:
    for activation in ops.ACTIVATIONS:
        yield _sample(f"{activation} of no rows", "empty", activation, make.normal(0, 16), make.signed(16))
        yield _sample(f"{activation} of no columns", "empty", activation, make.normal(3, 0), make.signed(0))
    for activation in ops.ACTIVATIONS:
        for shape in _SHAPES:
            input = make.normal(*shape[:-1], 2 * shape[-1], scale=3.0)
            label = f"{activation} of {list(input.shape)}"
            yield _sample(label, "adversarial", activation, input, make.signed(input.shape[-1]))
        yield _sample(f"{activation} without bias", "random", activation, make.normal(3, 40), None)
        yield _sample(f"{activation} of large and tiny values", "adversarial", activation, _extremes(make), None)
    yield _sample("gpt2 mlp", "real", "gelu_tanh", make.normal(7, 3072), make.signed(3072))
    yield _sample("llama mlp", "real", "silu", make.normal(3, 22016), None)


def _large(make: Make) -> Iterator[Sample]:
    for shape in ((MANY_ROWS, 2), (3, 2 * MANY_COLUMNS)):
        yield _sample(f"{list(shape)}", "adversarial", "silu", make.normal(*shape), make.signed(shape[-1]))


def _extremes(make: Make) -> Tensor:
    """From the smallest values to such as leave every exponential's range, of either sign; second halves are 1."""
    sizes = torch.tensor([0.0, 1e-7, 1e-3, 0.5, 0.9, 1.0, 4.0, 5.5, 9.0, 20.0, 90.0, 110.0])
    values = torch.cat([sizes, -sizes])
    return torch.stack([torch.ones_like(values), values]).flatten().unsqueeze(0).to(make.dtype)


def _sample(label: str, kind: Kind, activation: str, input: Tensor, bias: Tensor | None) -> Sample:
    return Sample(label, {"input": input, "bias": bias, "activation": activation}, kind)


def _random(gated: bool) -> Callable[[Make], Mapping[str, Any]]:
    def random(make: Make) -> Mapping[str, Any]:
        input = make.normal(*make.shape(even=gated), scale=make.pick(1.0, 3.0, 30.0))
        bias = make.signed(input.shape[-1]) if make.chance() else None
        return {"input": input, "bias": bias, "activation": make.pick(*ops.ACTIVATIONS)}

    return random


def _schema_arguments(arguments: Mapping[str, Any]) -> Sequence[Any]:
    input, bias, activation = arguments.values()
    return [input, bias, ops.ACTIVATIONS.index(activation)]


_BIAS = OpInfo(
    name="bias_activation",
    family="activation",
    function=ops.bias_activation,
    formula=_bias_activation,
    samples=_samples,
    random=_random(gated=False),
    # Where GELU is almost zero it is a difference of numbers near 1, times the input.
    atol={torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6},
    schema_arguments=_schema_arguments,
    large=_large,
)

OPS = (
    _BIAS,
    dataclasses.replace(_BIAS, name="bias_activation_", function=ops.bias_activation_, written=("input",)),
    dataclasses.replace(
        _BIAS,
        name="gated_activation",
        function=ops.gated_activation,
        formula=_gated_activation,
        random=_random(gated=True),
        # The activation's absolute error is multiplied by the first half.
        atol={torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5},
    ),
)
