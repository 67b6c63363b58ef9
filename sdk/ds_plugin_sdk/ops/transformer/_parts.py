"""Checks, and parts of reference implementations, that these ops have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _philox
from ds_plugin_sdk.ops._checks import CheckError, check_first, check_other
from ds_plugin_sdk.ops._references import working


def biased(input: Tensor, bias: Tensor | None) -> Tensor:
    """``input + bias`` in the dtype in which references compute."""
    x = input.to(working(input))
    return x if bias is None else x + bias.to(x.dtype)


def sum_of(input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
    """``residual + dropout(input + bias)``, of input's dtype."""
    x = drop(biased(input, bias), seed, p)
    return contiguous(x if residual is None else x + residual.to(x.dtype), input)


def drop(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """``dropout(x)``."""
    if p == 0:
        return x
    assert seed is not None
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    kept = _philox.keep(seed, rows, x.shape[-1], p).view(x.shape)
    return torch.where(kept, x / (1 - p), 0.0)


def columns_of(x: Tensor, like: Tensor, wanted: bool) -> Tensor:
    """The sum of all rows, or nothing."""
    if not wanted:
        return like.new_empty(0)
    return x.flatten(0, -2).sum(dim=0).to(like.dtype) if x.dim() > 1 else x.to(like.dtype, copy=True)


def contiguous(x: Tensor, like: Tensor) -> Tensor:
    """A new contiguous tensor of the dtype of `like`."""
    return torch.empty_like(x, dtype=like.dtype, memory_format=torch.contiguous_format).copy_(x)


def empty_columns(like: Tensor, wanted: bool) -> Tensor:
    """As `columns_of` gives it, without data."""
    return like.new_empty(like.shape[-1] if wanted else 0)


def check_dropout(first: Tensor, seed: Tensor | None, p: float, name: str = "grad_output") -> None:
    """Check an op's first argument, called `name`, and what decides on its dropout."""
    check_first(name, first)
    if not 0 <= p < 1:
        raise CheckError(f"p is {p}; expected at least 0 and less than 1")
    if p == 0:
        return
    if seed is None:
        raise CheckError("seed is missing; expected one, since p is not 0")
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != first.device:
        raise CheckError(
            f"seed is {seed.dtype} {list(seed.shape)} on {seed.device}; expected int64, one element, on {first.device}",
        )


def check_statistic(name: str, statistic: Tensor | None, rows: Tensor) -> None:
    """Check what an op returned for each row."""
    if statistic is None:
        return
    wanted = (working(rows), rows.shape[:-1], rows.device)
    if (statistic.dtype, statistic.shape, statistic.device) != wanted:
        raise CheckError(
            f"{name} is {statistic.dtype} {list(statistic.shape)} on {statistic.device}; "
            f"expected {wanted[0]} {list(wanted[1])} on {wanted[2]}",
        )


def check_sum(input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float) -> None:
    """Check the arguments of `sum_of`."""
    check_dropout(input, seed, p, "input")
    check_other("bias", bias, input, input.shape[-1:])
    check_other("residual", residual, input, input.shape)
