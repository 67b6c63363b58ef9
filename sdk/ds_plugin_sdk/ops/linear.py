"""Linear layers for inference, with weights in floating point, int8 or int4: ``ds_plugin::linear``.

A backward pass through them raises `SdkError`: the functions of `ds_plugin_sdk.nn` have derivatives.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._activations import ACTIVATIONS, Activation, activate, check_activation, number_of
from ds_plugin_sdk.ops._checks import DTYPES, CheckError
from ds_plugin_sdk.ops._references import working

# Columns of int4 weights that are packed together.
_INT4_BLOCK = 64
# Weights quantized at a time: on a CPU for each thread, so that what is made of them stays in the caches; elsewhere.
_AT_ONCE, _AT_ONCE_ON_DEVICES = 1 << 17, 1 << 24


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    offsets: Tensor | None = None,
    activation: Activation = "identity",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(input @ weight.T + bias) + residual``, computed in float32 and rounded once.

    With `gated`, the rows of `weight` and `bias` are two halves, and the result is that of the first times the
    activation of that of the second: ``h1 * activation(h2) + residual``.

    Args:
        input: ``[..., in]``: float32, bfloat16, float16 (float64: reference only).
        weight: ``[out, in]`` (``[2 * out, in]`` if gated): the dtype of input, or int8; or uint8, ``[out, in / 2]``,
            two weights of 4 bits in each, as `quantize_weight` packs them.
        bias: as many elements as `weight` has rows, the dtype of input.
        scales: ``[rows, groups]``, float32, for weights in 8 or 4 bits only: weight ``[r, c]`` stands for
            ``weight[r, c] * scales[r, c // (in / groups)]``, see `quantize_weight`. In 4 bits ``in / groups`` is a
            multiple of 64.
        offsets: ``[rows, groups]``, float32, for weights in 4 bits only: what is added to each weight of a group after
            its scale, ``scale * (8 - zero)`` where levels 0 to 15 have a zero point, see `pack_int4`.
        activation: of the sum with the bias: ``gelu`` is that with the error function, ``gelu_tanh`` its approximation.
        residual: ``[..., out]``, added last, the dtype of input.

    Returns:
        ``[..., out]``, a new tensor of the dtype of input.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or no such activation.
    """
    number = number_of("linear", activation)
    result: Tensor = _library.call("linear", input, weight, bias, scales, offsets, residual, number, gated)
    return result


def quantize_weight(weight: Tensor, group_size: int = 128, bits: Literal[4, 8] = 8) -> tuple[Tensor, Tensor]:
    """Weights in int8 or int4 with a scale for each group of columns of each row, symmetric.

    In 8 bits ``scale = max |w| / 127``, and no weight moves by more than half a scale. In 4 bits levels are -8 to 7,
    and the weight of the largest size is at -8 or at 7, whichever has the smaller squared error. Those near to the
    opposite of one at -8, which would be 8, are at 7 and move by up to a scale, all others by half of one. The scale's
    own rounding adds to that. Weights that are multiples of a scale, from -8 to 7, and have one at -8, -7 or 7, stay
    what they are, but for rounding.

    Args:
        weight: ``[rows, in]``, any floating-point dtype.
        group_size: columns that share a scale; must divide `in`, and in 4 bits be a multiple of 64.
        bits: of a weight.

    Returns:
        The weights, rounded to nearest even, int8 ``[rows, in]``; in 4 bits uint8 ``[rows, in / 2]``: of each 64
        columns, words of 16 bits, little-endian, have columns j, 16 + j, 32 + j and 48 + j, each plus 8, from the
        lowest bits up. The scales, float32, ``[rows, in / group_size]``.

    Raises:
        InvalidTensorError: `weight` is no matrix, or the group size or the number of bits does not fit.
    """
    if bits not in (4, 8):
        raise _library.invalid("quantize_weight", f"bits is {bits!r}; expected 4 or 8")
    multiple = _INT4_BLOCK if bits == 4 else 1
    if weight.dim() != 2 or group_size <= 0 or weight.shape[1] % group_size or group_size % multiple:
        expected = f"a multiple of {multiple} that divides its columns" if bits == 4 else "a divisor of its columns"
        raise _library.invalid(
            "quantize_weight",
            f"weight is {list(weight.shape)}, group_size {group_size}; expected a matrix, and {expected}",
        )
    rows, columns = weight.shape
    width, dtype = (columns // 2, torch.uint8) if bits == 4 else (columns, torch.int8)
    quantized = weight.new_empty((rows, width), dtype=dtype)
    scales = weight.new_empty((rows, columns // group_size), dtype=torch.float32)
    elements = _AT_ONCE * torch.get_num_threads() if weight.device.type == "cpu" else _AT_ONCE_ON_DEVICES
    at_once = max(1, elements // max(1, columns))
    for first in range(0, rows, at_once):
        some = slice(first, first + at_once)
        groups = weight[some].detach().to(torch.float32).reshape(*scales[some].shape, group_size)
        levels, scales[some] = _int4_levels(groups) if bits == 4 else _int8_levels(groups)
        quantized[some] = _pack((levels.flatten(1) + 8).to(torch.uint8)) if bits == 4 else levels.flatten(1)
    return quantized, scales


def _int8_levels(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Of groups ``[rows, groups, columns]``, and their scales."""
    scales = groups.abs().amax(dim=2, keepdim=True) / 127
    return (groups / _or_one(scales)).round_().clamp_(-127, 127), scales.squeeze(2)


def _int4_levels(groups: Tensor) -> tuple[Tensor, Tensor]:
    """As `_int8_levels`."""
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    units = groups / _or_one(largest)  # the largest is 1: squares neither overflow nor vanish
    at_8, at_7 = (_int4_levels_at(units, place) for place in (-8.0, 7.0))
    errors = [(levels / place).sub_(units).square_().sum(2, keepdim=True) for levels, place in ((at_8, -8), (at_7, 7))]
    better = errors[1] < errors[0]
    scales = largest / torch.where(better, 7.0, -8.0)
    return torch.where(better, at_7, at_8), scales.squeeze(2)


def _int4_levels_at(units: Tensor, place: float) -> Tensor:
    """Those of weights if 1 is at a place."""
    return (units * place).round_().clamp_(-8, 7)


def _or_one(scales: Tensor) -> Tensor:
    """Divisors for groups: 1 for those of zeros."""
    return torch.where(scales == 0, 1.0, scales)


def pack_int4(levels: Tensor, scales: Tensor, zeros: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights that were quantized to 4 bits by others, as `linear` takes them: ``scale * (level - zero)``.

    Args:
        levels: ``[rows, in]``, integers from 0 to 15, of any dtype.
        scales: ``[rows, groups]``, any floating-point dtype; a group has a multiple of 64 columns.
        zeros: ``[rows, groups]``, any dtype, integers or not; None for 8, which symmetric quantizers have.

    Returns:
        The weights, uint8 ``[rows, in / 2]``, as `quantize_weight` packs them; scales and offsets, float32,
        ``[rows, groups]``. Offsets are None where all zero points are 8.

    Raises:
        InvalidTensorError: shapes do not fit, or a level is none of 0 to 15.
    """
    block = _INT4_BLOCK * (scales.shape[1] if scales.dim() == 2 else 0)
    if levels.dim() != 2 or block == 0 or scales.shape[0] != levels.shape[0] or levels.shape[1] % block:
        raise _library.invalid(
            "pack_int4",
            f"levels is {list(levels.shape)}, scales {list(scales.shape)}; expected [rows, in] and [rows, groups], and "
            f"groups of a multiple of {_INT4_BLOCK} columns",
        )
    if zeros is not None and zeros.shape != scales.shape:
        raise _library.invalid("pack_int4", f"zeros is {list(zeros.shape)}; expected {list(scales.shape)} as scales")
    if levels.numel() and not 0 <= int(levels.amin()) <= int(levels.amax()) <= 15:
        span = f"{int(levels.amin())} to {int(levels.amax())}"
        raise _library.invalid("pack_int4", f"levels are {span}; expected 0 to 15: add 8 to signed ones")
    pairs, scales = _pack(levels.to(torch.uint8)), scales.to(torch.float32)
    if zeros is None or bool((zeros == 8).all()):
        return pairs, scales, None
    return pairs, scales, scales * (8 - zeros.to(torch.float32))


def _pack(levels: Tensor) -> Tensor:
    rows, columns = levels.shape
    parts = levels.reshape(rows, columns // _INT4_BLOCK, 4, _INT4_BLOCK // 4)
    return torch.stack((parts[:, :, 0] | parts[:, :, 1] << 4, parts[:, :, 2] | parts[:, :, 3] << 4), dim=3).flatten(1)


def _unpack(pairs: Tensor) -> Tensor:
    words = pairs.reshape(pairs.shape[0], 2 * pairs.shape[1] // _INT4_BLOCK, _INT4_BLOCK // 4, 2)
    first, second = words[..., 0], words[..., 1]
    return torch.stack((first & 15, first >> 4, second & 15, second >> 4), dim=2).flatten(1).to(torch.int8) - 8


def dequantize_weight(
    weight: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, *, offsets: Tensor | None = None
) -> Tensor:
    """What weights in 8 or 4 bits with their scales and offsets stand for.

    Args:
        weight: int8 ``[rows, in]``, or 4 bits as uint8 ``[rows, in / 2]``, as `quantize_weight` and `pack_int4` give
            them. The dtype is not checked: others than uint8 are multiplied by their scales as they are.
        scales: float32, ``[rows, in / group_size]``.
        dtype: of the result.
        offsets: the shape and dtype of `scales`, added to each weight of a group after the scale; None for none.

    Returns:
        ``[rows, in]`` in `dtype`, computed in the dtype of `scales`.

    Raises:
        RuntimeError: shapes do not fit each other (torch's error).
    """
    steps = _unpack(weight) if weight.dtype == torch.uint8 else weight
    groups = steps.to(scales.dtype).reshape(*scales.shape, steps.shape[1] // scales.shape[1])
    scaled = groups * scales.unsqueeze(2)
    return (scaled if offsets is None else scaled + offsets.unsqueeze(2)).flatten(1).to(dtype)


def _check(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    offsets: Tensor | None,
    residual: Tensor | None,
    activation: int,
    gated: bool,
) -> None:
    if input.dtype not in DTYPES:
        raise CheckError(f"input is {input.dtype}; expected float32, bfloat16 or float16")
    in_a_byte = 2 if weight.dtype == torch.uint8 else 1
    if weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != weight.shape[1] * in_a_byte:
        sizes = f"input is {list(input.shape)}, weight {list(weight.shape)}"
        raise CheckError(f"{sizes}; expected [..., in] and [out, in], or [out, in / 2] of int4 pairs")
    rows = weight.shape[0]
    if gated and rows % 2:
        raise CheckError(f"weight has {rows} rows; expected an even number for two halves")
    check_activation(activation)
    _check_scales(weight, scales, input.dtype)
    _check_offsets(weight, scales, offsets)
    expected = (("bias", bias, [rows]), ("residual", residual, [*input.shape[:-1], _columns(weight, gated)]))
    for name, tensor, shape in expected:
        if tensor is not None and (list(tensor.shape) != shape or tensor.dtype != input.dtype):
            raise CheckError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {input.dtype} {shape}")
    others = {"weight": weight, "bias": bias, "scales": scales, "offsets": offsets, "residual": residual}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != input.device:
            raise CheckError(f"{name} is on {tensor.device}; expected {input.device}, where input is")


def _check_scales(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> None:
    if weight.dtype not in (torch.int8, torch.uint8):
        if scales is not None or weight.dtype != dtype:
            raise CheckError(f"weight is {weight.dtype}; expected {dtype}, or int8 or int4 pairs with scales")
        return
    rows, columns = weight.shape
    kind, multiple = ("int8", 1)
    if weight.dtype == torch.uint8:
        columns, kind, multiple = 2 * columns, "int4 pairs", _INT4_BLOCK
    if scales is None or scales.dim() != 2 or scales.shape[0] != rows or scales.dtype != torch.float32:
        raise CheckError(f"weight is {kind}; expected scales in float32, [{rows}, groups]")
    if scales.shape[1] == 0 or columns % scales.shape[1]:
        raise CheckError(f"scales has {scales.shape[1]} groups; expected a divisor of {columns} columns")
    if columns // scales.shape[1] % multiple:
        raise CheckError(
            f"scales has {scales.shape[1]} groups of {columns} int4 columns; expected a multiple of {multiple} in each"
        )


def _check_offsets(weight: Tensor, scales: Tensor | None, offsets: Tensor | None) -> None:
    if offsets is None:
        return
    if weight.dtype != torch.uint8 or scales is None:
        raise CheckError(f"offsets are given, weight is {weight.dtype}; expected none, or int4 pairs")
    if offsets.shape != scales.shape or offsets.dtype != torch.float32:
        expected = f"torch.float32 {list(scales.shape)} as scales"
        raise CheckError(f"offsets is {offsets.dtype} {list(offsets.shape)}; expected {expected}")


def _columns(weight: Tensor, gated: bool) -> int:
    """How many outputs there are."""
    return weight.shape[0] // 2 if gated else weight.shape[0]


@_library.op(
    "linear(Tensor input, Tensor weight, Tensor? bias, Tensor? scales, Tensor? offsets, Tensor? residual, "
    "int activation, bool gated) -> Tensor",
    check=_check,
    outputs=lambda input, weight, gated: input.new_empty((*input.shape[:-1], _columns(weight, gated))),
)
def linear_reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    offsets: Tensor | None,
    residual: Tensor | None,
    activation: int,
    gated: bool,
) -> Tensor:
    """``ds_plugin::linear`` in plain torch, on any device; `activation` is an index into `ACTIVATIONS`."""
    dtype = working(input)
    wide_offsets = None if offsets is None else offsets.to(dtype)
    matrix = (
        weight.to(dtype) if scales is None else dequantize_weight(weight, scales.to(dtype), dtype, offsets=wide_offsets)
    )
    hidden = functional.linear(input.to(dtype), matrix, None if bias is None else bias.to(dtype))
    first, second = hidden.chunk(2, dim=-1) if gated else (None, hidden)
    result = activate(second, ACTIVATIONS[activation])
    if first is not None:
        result = first * result
    if residual is not None:
        result = result + residual.to(dtype)
    return result.to(input.dtype)


__all__ = [
    "ACTIVATIONS",
    "Activation",
    "activate",
    "dequantize_weight",
    "linear",
    "linear_reference",
    "pack_int4",
    "quantize_weight",
]
