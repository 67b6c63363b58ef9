"""A vendor's own op with its description, and two kernels of it: one right, one wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_cpu.accelerator import CPU_Accelerator
from ds_plugin_sdk.conformance.op_info import Make, OpInfo, Sample
from ds_plugin_sdk.errors import InvalidTensorError

_wrong: list[bool] = []


@torch.library.custom_op("zap::scaled_relu", mutates_args=())
def scaled_relu(x: Tensor, scale: Tensor, slope: float) -> Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16) or scale.dtype != x.dtype:
        raise InvalidTensorError(f"x is {x.dtype}, scale is {scale.dtype}", op="scaled_relu", why="one of two dtypes")
    if x.shape[-1:] != scale.shape or x.device != scale.device:
        raise InvalidTensorError("scale does not fit x", op="scaled_relu", why="one number a column, on x's device")
    rows = x.float() * scale.float()
    result = torch.where(rows < 0, slope * rows, rows).to(x.dtype)
    if _wrong and x.shape[-1] % 4:
        result[..., -1] = 0  # what no vector of four holds
    return result


@scaled_relu.register_fake
def _(x: Tensor, scale: Tensor, slope: float) -> Tensor:
    if x.device != scale.device:
        raise InvalidTensorError("scale is on another device", op="scaled_relu", why="one device")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _formula(x: Tensor, scale: Tensor, slope: float) -> tuple[Tensor]:
    rows = x * scale
    return (torch.where(rows < 0, slope * rows, rows),)


def _sample(make: Make, *shape: int) -> Mapping[str, Any]:
    return {"x": make.normal(*shape), "scale": make.positive(shape[-1]), "slope": 0.1}


def _samples(make: Make) -> Iterator[Sample]:
    yield Sample("no rows", _sample(make, 0, 16), "empty")
    for columns in (1, 15, 16, 17):
        yield Sample(f"{columns} columns", _sample(make, 3, columns), "adversarial")
    yield Sample("hidden size 4096", _sample(make, 2, 4096), "real")


OPS = [
    OpInfo(
        name="scaled_relu",
        namespace="zap",
        family="",
        function=scaled_relu,
        formula=_formula,
        samples=_samples,
        random=lambda make: _sample(make, *make.shape()),
        dtypes=(torch.float32, torch.bfloat16),
    )
]


class Right(CPU_Accelerator):
    """The CPU with an op more."""

    op_info = "vendor_ops"


def wrong() -> Right:
    """The same, its kernel without the tail of a row."""
    _wrong.append(True)
    return Right()
