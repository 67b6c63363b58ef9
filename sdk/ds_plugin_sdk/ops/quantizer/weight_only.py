"""``ds_plugin::dequantize_range``, for DeepSpeed's weight-only quantization."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_dtype, check_floating
from ds_plugin_sdk.ops._references import working
from ds_plugin_sdk.ops.quantizer._parts import check_bits, check_same_device


def dequantize_range(levels: Tensor, scale: Tensor, minimum: Tensor, *, group_size: int, bits: int = 8) -> Tensor:
    """Values of DeepSpeed's weight-only quantization: ``level / scale + minimum``, in float32, rounded once.

    There ``scale = (2^bits - 1) / (max - min)`` of each group, and levels are unsigned.

    Args:
        levels: uint8, ``groups * group_size`` levels in order; with 4 bits two in a byte, the first in its upper half.
        scale: one number for each group: float32, bfloat16 or float16, any shape.
        minimum: one number for each group, dtype of `scale`.
        group_size: number of values in a group; even with 4 bits.
        bits: 8 or 4.

    Returns:
        Shape ``(groups, group_size)``, dtype of `scale`.

    Raises:
        InvalidTensorError: dtype or shape do not fit.
    """
    values: Tensor = _library.call("dequantize_range", levels, scale, minimum, group_size, bits)
    return values


def _check(levels: Tensor, scale: Tensor, minimum: Tensor, group_size: int, bits: int) -> None:
    check_bits(bits)
    check_dtype("levels", levels, torch.uint8)
    check_floating("scale", scale)
    check_dtype("minimum", minimum, scale.dtype)
    check_same_device("scale", scale, levels)
    check_same_device("minimum", minimum, levels)
    groups = scale.numel()
    if minimum.numel() != groups:
        raise CheckError(f"minimum has {minimum.numel()} elements; expected {groups}, as many as scale")
    values = levels.numel() * (8 // bits)
    if group_size <= 0 or group_size % (8 // bits) or values != groups * group_size:
        raise CheckError(f"levels has {values} values; expected {groups} groups of {group_size}")


@_library.op(
    "dequantize_range(Tensor levels, Tensor scale, Tensor minimum, int group_size, int bits) -> Tensor",
    check=_check,
    outputs=lambda scale, group_size: scale.new_empty(scale.numel(), group_size),
)
def dequantize_range_reference(levels: Tensor, scale: Tensor, minimum: Tensor, group_size: int, bits: int) -> Tensor:
    """``ds_plugin::dequantize_range`` in plain torch, on any device."""
    flat = levels.reshape(-1)
    if bits == 4:
        flat = torch.stack((flat >> 4, flat & 15), dim=-1)
    values = flat.reshape(-1, group_size) / scale.to(working(scale)).reshape(-1, 1)
    return (values + minimum.to(working(minimum)).reshape(-1, 1)).to(scale.dtype)
