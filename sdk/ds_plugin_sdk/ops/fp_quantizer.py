"""Grouped quantization to floating-point numbers of 4 to 12 bits: ``ds_plugin::fp_quantize`` and ``fp_dequantize``.

A number has a sign, E bits of exponent and M of mantissa, from the upper end down; none stands for infinity or NaN, and
none is subnormal. With bias b = 2^(E-1) - 1 a number with exponent e and mantissa m is ``(1 + m / 2^M) 2^(e - b)``, and
0 where both are 0. That is DeepSpeed's (csrc/fp_quantizer), where 0 has no number of its own.

====  =  =  =======
bits  E  M  largest
====  =  =  =======
8     4  3  480
8     5  2  114688
12    4  7  510
6     3  2  28
4     2  1  6
====  =  =  =======

A group's numbers lie one behind the other from the lowest bit up, followed by its scale, a float32 of 4 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import (
    CheckError,
    check_device,
    check_dtype,
    check_first,
    text,
)

SCALE_BYTES = 4
# Numbers of so many lie in whole bytes.
_TOGETHER = 8
_MOST_GROUP = 2**30


class Format(NamedTuple):
    """Bits of exponent and of mantissa."""

    exponent: int
    mantissa: int

    @property
    def bias(self) -> int:
        """What is taken from a stored exponent, as in IEEE 754."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest number."""
        return float(2 ** (2**self.exponent - 1 - self.bias) * (2 - 2.0**-self.mantissa))


FORMATS = {(1 + e + m, m): Format(e, m) for e, m in ((4, 3), (5, 2), (4, 7), (3, 2), (2, 1))}


def fp_quantize(
    x: Tensor, *, group_size: int, bits: int = 8, mantissa_bits: int = 3, noise: Tensor | None = None
) -> Tensor:
    """Quantize a tensor in groups, each with a scale of its own.

    Of a group whose largest magnitude is a, with L the format's largest number, in float32::

        v = x * (L / a)                    stored: round(v), and a / L

    `round` is to nearest, ties away from 0; what is less than the least number becomes that, except 0. A NaN or an
    infinity makes its whole group NaN when it is dequantized. A group with no magnitude above 2^-110 becomes 0.

    Args:
        x: any shape: float32, bfloat16, float16 (float64: reference only, as float32); a multiple of `group_size`
            elements.
        group_size: number of elements of a group, a multiple of 8, at most 2^30.
        bits: 8, 12, 6 or 4.
        mantissa_bits: 3 or 2 of 8, 7 of 12, 2 of 6, 1 of 4.
        noise: float32 in [0, 1), shape of `x`, added to each magnitude in units of its last place before that is cut
            off, which makes the rounding stochastic. None for rounding to nearest.

    Returns:
        uint8 ``[groups, group_size * bits / 8 + 4]``: the numbers of each group and its scale.

    Raises:
        InvalidTensorError: a dtype, a shape or the format does not fit.
    """
    stored: Tensor = _library.call("fp_quantize", x, noise, group_size, bits, mantissa_bits)
    return stored


def fp_dequantize(
    stored: Tensor, *, group_size: int, bits: int = 8, mantissa_bits: int = 3, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """What `fp_quantize` stored, as values: ``number * scale`` in float32, rounded once.

    Args:
        stored: uint8 ``[groups, group_size * bits / 8 + 4]``.
        group_size, bits, mantissa_bits: as in `fp_quantize`.
        dtype: of the result: float32, bfloat16 or float16.

    Returns:
        ``[groups, group_size]``.

    Raises:
        InvalidTensorError: a dtype, a shape or the format does not fit.
    """
    values: Tensor = _library.call("fp_dequantize", stored, group_size, bits, mantissa_bits, dtype)
    return values


def _check_format(group_size: int, bits: int, mantissa_bits: int) -> None:
    if (bits, mantissa_bits) not in FORMATS:
        known = ", ".join(f"{bits} with {mantissa}" for bits, mantissa in FORMATS)
        raise CheckError(f"bits is {bits} with a mantissa of {mantissa_bits}; expected {known}")
    if group_size <= 0 or group_size % _TOGETHER or group_size > _MOST_GROUP:
        raise CheckError(f"group_size is {group_size}; expected a multiple of {_TOGETHER}, at most {_MOST_GROUP}")


def _check_quantize(x: Tensor, noise: Tensor | None, group_size: int, bits: int, mantissa_bits: int) -> None:
    check_first("x", x)
    _check_format(group_size, bits, mantissa_bits)
    if x.numel() % group_size:
        raise CheckError(f"x has {x.numel()} elements; expected a multiple of group_size, which is {group_size}")
    if noise is None:
        return
    check_dtype("noise", noise, torch.float32)
    check_device("noise", noise, x)
    if noise.shape != x.shape:
        raise CheckError(f"noise has shape {list(noise.shape)}; expected {list(x.shape)}, that of x")


def _row_bytes(group_size: int, bits: int) -> int:
    return group_size * bits // 8 + SCALE_BYTES


def _new_stored(x: Tensor, group_size: int, bits: int) -> Tensor:
    return x.new_empty((x.numel() // group_size, _row_bytes(group_size, bits)), dtype=torch.uint8)


@_library.op(
    "fp_quantize(Tensor x, Tensor? noise, int group_size, int bits, int mantissa_bits) -> Tensor",
    check=_check_quantize,
    outputs=_new_stored,
)
def fp_quantize_reference(x: Tensor, noise: Tensor | None, group_size: int, bits: int, mantissa_bits: int) -> Tensor:
    """``ds_plugin::fp_quantize`` in plain torch, on any device."""
    form = FORMATS[bits, mantissa_bits]
    values = x.to(torch.float32).reshape(-1, group_size)
    largest = values.abs().amax(dim=1, keepdim=True) if values.numel() else values.new_zeros(values.shape[0], 1)
    most = torch.full_like(largest, form.largest)  # torch divides by a number, or a number, in two roundings
    scaled = values * torch.where(largest == 0, 1.0, most / largest)
    scaled = torch.where(scaled.isfinite(), scaled, 0.0)
    codes = _codes(scaled, None if noise is None else noise.reshape(-1, group_size), form)
    scales = (largest / most).flatten().view(torch.uint8).reshape(-1, SCALE_BYTES)
    return torch.cat((_packed(codes, bits), scales), dim=1)


def _codes(values: Tensor, noise: Tensor | None, form: Format) -> Tensor:
    """The numbers nearest to float32 values, as whole numbers, int32."""
    in_memory = values.view(torch.int32)
    magnitude = torch.bitwise_and(in_memory, 0x7FFFFFFF)
    lost = 23 - form.mantissa
    added = 1 << (lost - 1) if noise is None else (noise * 2**lost).to(torch.int32)
    rounded = (magnitude + added) >> lost  # the carry goes into the exponent
    codes = rounded - ((127 - form.bias) << form.mantissa)
    codes = codes.clamp(1 << form.mantissa, (1 << (form.exponent + form.mantissa)) - 1)
    codes = torch.where(magnitude < 1 << 23, 0, codes)
    return codes | (in_memory < 0).to(torch.int32) << (form.exponent + form.mantissa)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits, one behind the other in bytes: ``[groups, group_size]`` to ``[groups, bytes]``."""
    together = codes.reshape(codes.shape[0], codes.shape[1] // _TOGETHER, _TOGETHER)
    made = together.new_zeros(*together.shape[:-1], bits)
    for byte in range(bits):
        for i in range(_TOGETHER):
            if _meet(i, bits, byte):
                made[..., byte] |= _shifted(together[..., i], i * bits - 8 * byte)
    return torch.bitwise_and(made, 0xFF).to(torch.uint8).flatten(1)


def _unpacked(stored: Tensor, bits: int) -> Tensor:
    """Undoes `_packed`: int32."""
    together = stored.to(torch.int32).reshape(stored.shape[0], stored.shape[1] // bits, bits)
    codes = together.new_zeros(*together.shape[:-1], _TOGETHER)
    for i in range(_TOGETHER):
        for byte in range(bits):
            if _meet(i, bits, byte):
                codes[..., i] |= _shifted(together[..., byte], 8 * byte - i * bits)
    return torch.bitwise_and(codes, (1 << bits) - 1).flatten(1)


def _meet(i: int, bits: int, byte: int) -> bool:
    """Whether number `i` has bits in a byte."""
    return i * bits < 8 * byte + 8 and 8 * byte < (i + 1) * bits


def _shifted(x: Tensor, left: int) -> Tensor:
    return x << left if left >= 0 else x >> -left


def _check_dequantize(stored: Tensor, group_size: int, bits: int, mantissa_bits: int, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckError(f"dtype is {text(dtype)}; expected float32, bfloat16 or float16")
    check_dtype("stored", stored, torch.uint8)
    _check_format(group_size, bits, mantissa_bits)
    expected = _row_bytes(group_size, bits)
    if stored.dim() != 2 or stored.shape[1] != expected:
        raise CheckError(f"stored has shape {list(stored.shape)}; expected [groups, {expected}]")


@_library.op(
    "fp_dequantize(Tensor stored, int group_size, int bits, int mantissa_bits, ScalarType dtype) -> Tensor",
    check=_check_dequantize,
    outputs=lambda stored, group_size, dtype: stored.new_empty((stored.shape[0], group_size), dtype=dtype),
)
def fp_dequantize_reference(
    stored: Tensor, group_size: int, bits: int, mantissa_bits: int, dtype: torch.dtype
) -> Tensor:
    """``ds_plugin::fp_dequantize`` in plain torch, on any device."""
    form = FORMATS[bits, mantissa_bits]
    codes = _unpacked(stored[:, :-SCALE_BYTES], bits)
    magnitude = codes & ((1 << (bits - 1)) - 1)
    values = (magnitude + ((127 - form.bias) << form.mantissa) << (23 - form.mantissa)).view(torch.float32)
    values = torch.where(magnitude == 0, 0.0, values)
    values = torch.where(codes >> (bits - 1) == 1, -values, values)
    scales = stored[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)  # in memory of its own, aligned
    return (values * scales.flatten().view(torch.float32).unsqueeze(1)).to(dtype)


__all__ = ["FORMATS", "SCALE_BYTES", "Format", "fp_dequantize", "fp_quantize"]
