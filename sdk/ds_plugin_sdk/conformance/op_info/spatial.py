"""Biases and residuals of diffusion models, channels last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import MANY_COLUMNS, MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import spatial

# The UNet of Stable Diffusion has 320 channels at 64 x 64 and 1280 at 8 x 8.
_SHAPES: dict[str, tuple[Kind, tuple[int, ...]]] = {
    "no image": ("empty", (0, 4, 3, 3)),
    "no tokens": ("empty", (2, 0, 4)),
    "image": ("random", (2, 7, 3, 5)),
    "one pixel": ("adversarial", (1, 33, 1, 1)),
    "tokens": ("adversarial", (2, 5, 17)),
    "unet, outer": ("real", (2, 320, 64, 64)),
    "unet, inner tokens": ("real", (2, 64, 1280)),
}


def _formula(
    *, activation: Tensor, bias: Tensor, other: Tensor | None = None, other_bias: Tensor | None = None
) -> tuple[Tensor]:
    def per_channel(vector: Tensor) -> Tensor:
        return vector.reshape(1, -1, 1, 1) if activation.dim() == 4 else vector

    sum_ = activation + per_channel(bias)
    if other is not None:
        sum_ = sum_ + other
    return (sum_ if other_bias is None else sum_ + per_channel(other_bias),)


def _large(*names: str) -> Callable[[Make], Iterator[Sample]]:
    def large(make: Make) -> Iterator[Sample]:
        for shape in ((1, 3, 257, 257), (2, MANY_COLUMNS, 2, 1), (1, MANY_ROWS, 3)):
            sizes: dict[str, tuple[int, ...]] = {"activation": shape, "other": shape}
            channels = shape[1] if len(shape) == 4 else shape[2]
            tensors: dict[str, Any] = {name: make.positive(*sizes.get(name, (channels,))) for name in names}
            yield Sample(f"{list(shape)}", tensors, "adversarial")

    return large


def _samples(*names: str) -> Callable[[Make], Iterator[Sample]]:
    def samples(make: Make) -> Iterator[Sample]:
        for label, (kind, shape) in _SHAPES.items():
            channels = shape[1] if len(shape) == 4 else shape[2]
            sizes: dict[str, tuple[int, ...]] = {"activation": shape, "other": shape}
            # Of one sign: the sum does not cancel what its terms were rounded to.
            tensors: dict[str, Any] = {name: make.positive(*sizes.get(name, (channels,))) for name in names}
            yield Sample(label, tensors, kind)
            if len(shape) == 4 and kind == "random":
                last = {
                    name: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
                    for name, t in tensors.items()
                }
                yield Sample(f"{label}, channels last", last, kind)

    return samples


def _random(*names: str) -> Callable[[Make], Mapping[str, Any]]:
    def random(make: Make) -> Mapping[str, Any]:
        shape = make.pick(make.shape(3), (make.size(3), make.size(40), make.size(20), make.size(20)))
        sizes: dict[str, tuple[int, ...]] = {"activation": shape, "other": shape}
        channels = shape[1] if len(shape) == 4 else shape[2]
        tensors = {name: make.positive(*sizes.get(name, (channels,))) for name in names}
        if len(shape) == 4 and make.chance():
            tensors |= {n: t.contiguous(memory_format=torch.channels_last) for n, t in tensors.items() if t.dim() == 4}
        return tensors

    return random


def _describe(function: Callable[..., Tensor], *names: str) -> OpInfo:
    return OpInfo(
        name=function.__name__,
        family="spatial",
        function=function,
        formula=_formula,
        samples=_samples(*names),
        random=_random(*names),
        large=_large(*names),
        broadcasts=("activation",) if names == ("activation", "bias") else (),
    )


OPS = (
    _describe(spatial.nhwc_bias_add, "activation", "bias"),
    _describe(spatial.nhwc_bias_add_add, "activation", "bias", "other"),
    _describe(spatial.nhwc_bias_add_bias_add, "activation", "bias", "other", "other_bias"),
)
