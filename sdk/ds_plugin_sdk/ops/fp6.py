"""Products with weights of six bits, as DeepSpeed's second inference engine has them.

``ds_plugin::fp6_pack`` and ``fp6_linear``.

A number has a sign, three bits of exponent and two of mantissa, and none of them stands for infinity or NaN: 0, 1/16,
2/16 and 3/16, then ``(1 + m / 4) * 2 ** (e - 3)`` up to 28 (Xia et al. 2024, FP6-LLM). In memory it is cut in two: sign
and upper bit of the exponent, four numbers a byte, and the four bits below, two numbers a byte; the first one lowest.

A backward pass through them raises `SdkError`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import DTYPES, CheckError, check_device, check_dtype, check_first, text
from ds_plugin_sdk.ops._references import working

# The magnitudes, in the order of their five bits.
_MAGNITUDES = tuple(m / 16 for m in range(4)) + tuple(
    (1 + m / 4) * 2.0 ** (e - 3) for e in range(1, 8) for m in range(4)
)


def fp6_pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Store weights in six bits each. Values that six bits do not have are rounded towards zero.

    Args:
        weight: ``[outputs, inputs]``, float16, contiguous or not; sizes from 1/16 to 28, or 0. DeepSpeed divides by a
            scale for each output to come there. The number of elements is a multiple of 4.

    Returns:
        uint8 ``[weight.numel() / 4]``, the upper two bits, and ``[weight.numel() / 2]``, the lower four.

    Raises:
        InvalidTensorError: a shape, the dtype, or a value does not fit.
    """
    result: tuple[Tensor, Tensor] = _library.call("fp6_pack", weight)
    return result


def fp6_linear(input: Tensor, weight_2bit: Tensor, weight_4bit: Tensor, scales: Tensor) -> Tensor:
    """``input @ (scales * weight).T`` for packed weights. Arithmetic is in float32, rounded once.

    Args:
        input: ``[..., inputs]``: float32, bfloat16, float16 (float64, computed as such).
        weight_2bit, weight_4bit: what `fp6_pack` gives for ``[outputs, inputs]``.
        scales: ``[outputs]``, any dtype that `input` may have.

    Returns:
        ``[..., outputs]``, the dtype of input.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit.
    """
    result: Tensor = _library.call("fp6_linear", input, weight_2bit, weight_4bit, scales)
    return result


def _check_pack(weight: Tensor) -> None:
    check_dtype("weight", weight, torch.float16)
    if weight.dim() != 2 or weight.numel() % 4:
        raise CheckError(f"weight has shape {list(weight.shape)}; expected [outputs, inputs], a multiple of 4 elements")


def _new_packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    elements = weight.shape[0] * weight.shape[1]
    return (
        weight.new_empty((elements // 4,), dtype=torch.uint8),
        weight.new_empty((elements // 2,), dtype=torch.uint8),
    )


@_library.op("fp6_pack(Tensor weight) -> (Tensor, Tensor)", check=_check_pack, outputs=_new_packed)
def fp6_pack_reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``ds_plugin::fp6_pack`` in plain torch, on any device."""
    size = weight.abs().to(torch.float32).flatten()
    magnitudes = torch.tensor(_MAGNITUDES, device=weight.device)
    fits = ((size >= magnitudes[1]) & (size <= magnitudes[-1])) | (size == 0)
    if not bool(fits.all()):
        raise CheckError("weight has values that six bits cannot hold; expected 0, or 1/16 to 28")
    below = torch.searchsorted(magnitudes, size, right=True) - 1
    bits = below + 32 * torch.signbit(weight).flatten()
    upper, lower = bits >> 4, bits & 15
    return _bytes_of(upper, 2), _bytes_of(lower, 4)


def _check_linear(input: Tensor, weight_2bit: Tensor, weight_4bit: Tensor, scales: Tensor) -> None:
    check_first("input", input)
    if scales.dtype not in DTYPES or scales.dim() != 1:
        raise CheckError(f"scales are {text(scales.dtype)} {list(scales.shape)}; expected floats [outputs]")
    elements = scales.shape[0] * input.shape[-1]
    for name, tensor, expected in (
        ("weight_2bit", weight_2bit, elements // 4),
        ("weight_4bit", weight_4bit, elements // 2),
    ):
        check_dtype(name, tensor, torch.uint8)
        if elements % 4 or tensor.shape != (expected,):
            raise CheckError(f"{name} has shape {list(tensor.shape)}; expected [{expected}]")
    for name, tensor in (("weight_2bit", weight_2bit), ("weight_4bit", weight_4bit), ("scales", scales)):
        check_device(name, tensor, input)


@_library.op(
    "fp6_linear(Tensor input, Tensor weight_2bit, Tensor weight_4bit, Tensor scales) -> Tensor",
    check=_check_linear,
    outputs=lambda input, scales: input.new_empty((*input.shape[:-1], scales.shape[0])),
)
def fp6_linear_reference(input: Tensor, weight_2bit: Tensor, weight_4bit: Tensor, scales: Tensor) -> Tensor:
    """``ds_plugin::fp6_linear`` in plain torch, on any device."""
    dtype = working(input)
    bits = 16 * _numbers_in(weight_2bit, 2) + _numbers_in(weight_4bit, 4)
    values = torch.tensor([*_MAGNITUDES, *(-size for size in _MAGNITUDES)], dtype=dtype, device=input.device)
    weight = values[bits].view(scales.shape[0], input.shape[-1]) * scales.to(dtype).unsqueeze(1)
    return functional.linear(input.to(dtype), weight).to(input.dtype)


def _bytes_of(numbers: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits, side by side in bytes."""
    shifts = torch.arange(0, 8, bits, device=numbers.device)
    return (numbers.view(-1, len(shifts)) << shifts).sum(1).to(torch.uint8)


def _numbers_in(packed: Tensor, bits: int) -> Tensor:
    """The numbers of `_bytes_of`, int64."""
    shifts = torch.arange(0, 8, bits, device=packed.device)
    shifted = torch.bitwise_right_shift(packed.to(torch.int64).unsqueeze(1), shifts)
    return torch.bitwise_and(shifted, 2**bits - 1).flatten()


__all__ = ["fp6_linear", "fp6_pack"]
