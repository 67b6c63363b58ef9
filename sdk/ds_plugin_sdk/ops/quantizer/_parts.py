"""Checks, and parts of reference implementations, that these ops have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops._checks import CheckError, check_dtype, check_floating


def check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise CheckError(f"bits is {bits}; expected 8 or 4")


def check_groups(argument: str, numel: int, groups: int, name: str = "groups") -> None:
    """Check that groups of equal size can be made of the elements of an argument."""
    if groups <= 0:
        raise CheckError(f"{name} is {groups}; expected a positive number")
    if numel % groups:
        raise CheckError(f"{argument} has {numel} elements; expected a multiple of {name}, which is {groups}")


def check_same_device(name: str, tensor: Tensor, first: Tensor) -> None:
    if tensor.device != first.device:
        raise CheckError(f"{name} is on {tensor.device}; expected all tensors on {first.device}")


def check_quantize(x: Tensor, groups: int, bits: int) -> None:
    """Check what is to be quantized."""
    check_bits(bits)
    check_floating("x", x)
    if x.dim() == 0:
        raise CheckError("x has no dimension; expected at least one")
    check_groups("x", x.numel(), groups)
    size = x.numel() // groups
    if bits == 4 and (size % 2 or x.shape[-1] % 2):
        raise CheckError(
            f"groups of {size} elements, a last dimension of {x.shape[-1]}; expected even numbers with 4 bits"
        )


def check_params(levels: Tensor, params: Tensor, bits: int, symmetric: bool) -> None:
    """Check what was quantized."""
    check_bits(bits)
    check_dtype("levels", levels, torch.int8)
    check_dtype("params", params, torch.float32)
    check_same_device("params", params, levels)
    if levels.dim() == 0:
        raise CheckError("levels has no dimension; expected at least one")
    columns = 1 if symmetric else 2
    if params.dim() != 2 or params.shape[0] == 0 or params.shape[1] != columns:
        raise CheckError(f"params has shape {list(params.shape)}; expected [groups, {columns}]")
    check_groups("levels", levels.numel(), params.shape[0])


def new_params(like: Tensor, groups: int, symmetric: bool) -> Tensor:
    """Params without data, on the device of `like`."""
    return like.new_empty(groups, 1 if symmetric else 2, dtype=torch.float32)


def quantize_groups(x: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Levels, int8, and params of the rows of a matrix."""
    if x.shape[1] == 0:
        span = offset = x.new_zeros(x.shape[0], 1)
    elif symmetric:
        span = 2 * x.abs().amax(dim=1, keepdim=True)
        offset = torch.zeros_like(span)
    else:
        low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
        span, offset = high - low, (high + low) / 2
    scale = torch.where(span == 0, 1.0, 2**bits / span)
    levels = ((x - offset) * scale).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).round()
    params = 1 / scale if symmetric else torch.cat((1 / scale, offset), dim=1)
    return levels.nan_to_num(0.0).to(torch.int8), params.float()


def dequantize_groups(levels: Tensor, params: Tensor, symmetric: bool) -> Tensor:
    """The values, float32, of a matrix of levels whose rows are groups."""
    values = levels.float() * params[:, :1]
    return values if symmetric else values + params[:, 1:]


def pack(levels: Tensor, bits: int) -> Tensor:
    """Two 4-bit levels of a row to a byte."""
    return levels if bits == 8 else (levels[:, ::2] << 4) | (levels[:, 1::2] & 15)


def unpack(levels: Tensor, bits: int) -> Tensor:
    """Undoes `pack`: the sign of 4 bits is bit 3."""
    if bits == 8:
        return levels
    pairs = torch.stack((levels >> 4, levels), dim=-1)
    return (((pairs & 15) ^ 8) - 8).flatten(1)
