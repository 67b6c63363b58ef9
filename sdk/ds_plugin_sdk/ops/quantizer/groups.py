"""``ds_plugin::quantize`` and ``dequantize``."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, text
from ds_plugin_sdk.ops._references import working
from ds_plugin_sdk.ops.quantizer._parts import (
    check_params,
    check_quantize,
    dequantize_groups,
    new_params,
    pack,
    quantize_groups,
    unpack,
)


def quantize(x: Tensor, *, groups: int, bits: int = 8, symmetric: bool = True) -> tuple[Tensor, Tensor]:
    """Quantize a tensor in groups; the formulas are the module's.

    Args:
        x: values, any shape of at least one dimension: float32, bfloat16, float16 (float64: reference only).
        groups: number of groups, a divisor of ``x.numel()``.
        bits: 8 or 4. With 4, groups and the last dimension are of even length.
        symmetric: whether the range is symmetric about 0; otherwise it is that of the values.

    Returns:
        levels: int8, shape of `x`; with 4 bits the last dimension is half as long.
        params: float32 of shape ``(groups, 1)``, or ``(groups, 2)`` if not symmetric.

    Raises:
        InvalidTensorError: dtype or shape do not fit.
    """
    levels, params = _library.call("quantize", x, groups, bits, symmetric)
    return levels, params


def dequantize(
    levels: Tensor, params: Tensor, *, bits: int = 8, symmetric: bool = True, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What `quantize` stored, as floating-point values: computed in float32, rounded once.

    Args:
        levels: int8, as `quantize` gives them.
        params: float32 of shape ``(groups, 1)``, or ``(groups, 2)`` if not symmetric, as `quantize` gives them.
        bits, symmetric: as in `quantize`.
        dtype: of the result: float32, bfloat16 or float16.

    Returns:
        The values: shape of `levels`; with 4 bits the last dimension is twice as long.

    Raises:
        InvalidTensorError: dtype or shape do not fit.
    """
    values: Tensor = _library.call("dequantize", levels, params, bits, symmetric, dtype)
    return values


def _new_quantized(x: Tensor, groups: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(_packed_shape(x.shape, bits), dtype=torch.int8), new_params(x, groups, symmetric)


def _packed_shape(shape: torch.Size, bits: int) -> list[int]:
    return [*shape[:-1], shape[-1] * bits // 8]


@_library.op(
    "quantize(Tensor x, int groups, int bits, bool symmetric) -> (Tensor, Tensor)",
    check=check_quantize,
    outputs=_new_quantized,
)
def quantize_reference(x: Tensor, groups: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """``ds_plugin::quantize`` in plain torch, on any device."""
    levels, params = quantize_groups(x.to(working(x)).reshape(groups, -1), bits, symmetric)
    return pack(levels, bits).reshape(_packed_shape(x.shape, bits)), params


def _check_dequantize(levels: Tensor, params: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckError(f"dtype is {text(dtype)}; expected float32, bfloat16 or float16")
    check_params(levels, params, bits, symmetric)


def _unpacked_shape(shape: torch.Size, bits: int) -> list[int]:
    return [*shape[:-1], shape[-1] * 8 // bits]


@_library.op(
    "dequantize(Tensor levels, Tensor params, int bits, bool symmetric, ScalarType dtype) -> Tensor",
    check=_check_dequantize,
    outputs=lambda levels, bits, dtype: levels.new_empty(_unpacked_shape(levels.shape, bits), dtype=dtype),
)
def dequantize_reference(levels: Tensor, params: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> Tensor:
    """``ds_plugin::dequantize`` in plain torch, on any device."""
    values = dequantize_groups(unpack(levels.reshape(params.shape[0], -1), bits), params, symmetric)
    return values.to(dtype).reshape(_unpacked_shape(levels.shape, bits))
