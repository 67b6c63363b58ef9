"""Layer norm and RMS norm, with what is added before them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import LONG_ROW, MANY_COLUMNS, MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import norm

_EPS = 1e-5
# Around every vector width; more than one share of work.
_SHAPES = ((1, 1), (2, 3), (3, 15), (2, 16), (2, 17), (3, 63), (33,), (3, 2, 65), (70, 257))
_REAL = ((4, 768), (2, 7, 4096))


def _layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor]:
    centred = input - input.mean(dim=-1, keepdim=True)
    return (centred / torch.sqrt((centred**2).mean(dim=-1, keepdim=True) + eps) * weight + bias,)


def _post_layer_norm(
    input: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, input_bias: Tensor | None
) -> tuple[Tensor]:
    return _layer_norm(_sum(input, residual, input_bias), weight, bias, eps)


def _pre_layer_norm(
    input: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, input_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    total = _sum(input, residual, input_bias)
    return *_layer_norm(total, weight, bias, eps), total


def _rms_norm(input: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> tuple[Tensor]:
    return (input / torch.sqrt((input**2).mean(dim=-1, keepdim=True) + eps) * (weight + weight_offset),)


def _pre_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return *_rms_norm(input + residual, weight, eps), input + residual


def _sum(input: Tensor, residual: Tensor, input_bias: Tensor | None) -> Tensor:
    return input + residual if input_bias is None else input + residual + input_bias


def _sample(
    make: Make, names: Sequence[str], label: str, kind: Kind, input: Tensor, omit: str = "", **others: float
) -> Sample:
    """A call of an op with the tensors `names` beside its input, and other arguments."""
    columns = input.shape[-1]
    shapes = {name: input.shape if name == "residual" else (columns,) for name in names}
    tensors = {name: None if name == omit else make.signed(*shape) for name, shape in shapes.items()}
    return Sample(label, {"input": input, **tensors, "eps": _EPS, **others}, kind)


def one_number_a_row(make: Make) -> Tensor:
    """Rows of one number, whose sum float32 holds, and whose squares' sum it rounds."""
    first, columns = {torch.bfloat16: (129, 8192), torch.float16: (1025, 1024)}.get(make.dtype, (4097, 1024))
    return (first + 6 * torch.arange(16.0)).unsqueeze(1).repeat(1, columns).to(make.dtype)


def _far_from_zero(make: Make, sample: Sample) -> Sample:
    """The same with a sum that is exact in every dtype."""
    input = sample.arguments["input"]
    far = {"residual": torch.full_like(input, 64.0 if make.dtype == torch.float32 else 14.0)}
    far |= {name: torch.zeros_like(sample.arguments[name]) for name in ("input_bias",) if name in sample.arguments}
    return Sample(sample.label, {**sample.arguments, **far}, sample.kind)


def _large(names: Sequence[str]) -> Callable[[Make], Iterator[Sample]]:
    def large(make: Make) -> Iterator[Sample]:
        for shape in ((MANY_ROWS, 17), (3, MANY_COLUMNS), (2, LONG_ROW)):
            yield _sample(make, names, f"{list(shape)}", "adversarial", make.normal(*shape))

    return large


def _samples(names: Sequence[str]) -> Callable[[Make], Iterator[Sample]]:
    def samples(make: Make) -> Iterator[Sample]:
        sample = functools.partial(_sample, make, names)
        yield sample("no rows", "empty", make.normal(0, 16))
        yield sample("no columns", "empty", make.normal(3, 0))
        for shape in _SHAPES:
            yield sample(f"shape {list(shape)}", "adversarial", make.normal(*shape))
        if "input_bias" in names:
            yield sample("no input bias", "random", make.normal(3, 40), omit="input_bias")
        if "residual" not in names:  # there the sum itself, in float32, loses what is looked for
            yield sample("far from zero", "adversarial", make.normal(3, 200) + 100)
        else:
            yield _far_from_zero(make, sample("a sum far from zero", "adversarial", _eighths(make, 3, 200)))
        yield sample("squares beyond float16", "adversarial", make.normal(3, 200, scale=1000.0))
        yield sample("tiny", "adversarial", make.normal(3, 200, scale=1e-4))
        yield sample("constant", "adversarial", torch.full((2, 70), 3.0).to(make.dtype))
        yield sample("a large eps", "adversarial", make.normal(3, 70), eps=0.5)
        for shape in _REAL:
            yield sample(f"hidden size {shape[-1]}", "real", make.normal(*shape))
        if names == ("weight",):
            for columns in (17, 640):
                label = f"1 is added to {columns} weights"
                yield sample(label, "real", make.normal(3, columns), weight_offset=1.0)
        same = sample("one number a row", "real", one_number_a_row(make))
        nothing = {name: torch.zeros_like(same.arguments[name]) for name in ("residual", "input_bias") if name in names}
        yield Sample(same.label, {**same.arguments, **nothing}, same.kind)

    return samples


def _eighths(make: Make, *shape: int) -> Tensor:
    """Multiples of 1/8 from -2 to 2."""
    return (make.integers(-16, 17, *shape) / 8).to(make.dtype)


def _random(names: Sequence[str]) -> Callable[[Make], Mapping[str, Any]]:
    def random(make: Make) -> Mapping[str, Any]:
        input = make.normal(*make.shape(), scale=make.pick(0.1, 1.0, 10.0))
        shapes = {name: input.shape if name == "residual" else input.shape[-1:] for name in names}
        tensors: dict[str, Any] = {name: make.signed(*shape) for name, shape in shapes.items()}
        if "residual" in names:  # a sum that is exact: the norm of two close numbers is that of what rounding left
            input, tensors["residual"] = _eighths(make, *input.shape), _eighths(make, *input.shape)
        if "input_bias" in names:
            tensors["input_bias"] = _eighths(make, *input.shape[-1:]) if make.chance() else None
        return {"input": input, **tensors, "eps": make.pick(1e-5, 1e-6, 1e-3)}

    return random


def _with_residual(arguments: Mapping[str, Any]) -> Sequence[Any]:
    return [arguments[name] for name in ("input", "residual", "input_bias", "weight", "bias", "eps")]


# Sums over a row, in float32, reach the result before it is rounded.
_ATOL = {torch.float32: 5e-6, torch.bfloat16: 5e-6, torch.float16: 5e-6}


def _info(function: Callable[..., Any], formula: Callable[..., tuple[Any, ...]], *names: str) -> OpInfo:
    return OpInfo(
        name=function.__name__,
        family="norm",
        function=function,
        formula=formula,
        samples=_samples(names),
        random=_random(names),
        atol=_ATOL,
        schema_arguments=_with_residual if "input_bias" in names else None,
        large=_large(names),
    )


OPS = (
    _info(norm.layer_norm, _layer_norm, "weight", "bias"),
    _info(norm.post_layer_norm, _post_layer_norm, "residual", "weight", "bias", "input_bias"),
    _info(norm.pre_layer_norm, _pre_layer_norm, "residual", "weight", "bias", "input_bias"),
    _info(norm.rms_norm, _rms_norm, "weight"),
    _info(norm.pre_rms_norm, _pre_rms_norm, "residual", "weight"),
)
