"""Linear layers for inference, with weights in floating point or in int8: ``ds_plugin::linear``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._activations import ACTIVATIONS, Activation, activate, check_activation, number_of
from ds_plugin_sdk.ops._checks import DTYPES, CheckError
from ds_plugin_sdk.ops._references import working


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    activation: Activation = "identity",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(input @ weight.T + bias) + residual``, computed in float32 and rounded once.

    With `gated`, the rows of `weight` and `bias` are two halves, and the result is that of the first times the
    activation of that of the second: ``h1 * activation(h2) + residual``.

    Args:
        input: ``[..., in]``: float32, bfloat16, float16 (float64: reference only).
        weight: ``[out, in]`` (``[2 * out, in]`` if gated): the dtype of input, or int8.
        bias: as many elements as `weight` has rows, the dtype of input.
        scales: ``[rows, groups]``, float32, for int8 weights only: weight ``[r, c]`` stands for
            ``weight[r, c] * scales[r, c // (in / groups)]``, see `quantize_weight`.
        activation: of the sum with the bias: ``gelu`` is that with the error function, ``gelu_tanh`` its approximation.
        residual: ``[..., out]``, added last, the dtype of input.

    Returns:
        ``[..., out]``, a new tensor of the dtype of input.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or no such activation.
    """
    number = number_of("linear", activation)
    result: Tensor = _library.call("linear", input, weight, bias, scales, residual, number, gated)
    return result


def quantize_weight(weight: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Weights in int8 with a scale for each group of columns of each row, symmetric: ``scale = max |w| / 127``.

    Args:
        weight: ``[rows, in]``, any floating-point dtype.
        group_size: columns that share a scale; must divide `in`.

    Returns:
        The weights, int8, ``[rows, in]``, rounded to nearest even; the scales, float32, ``[rows, in / group_size]``.
        What `linear` makes of them differs from `weight` by at most half a scale (and the scale's own rounding).

    Raises:
        InvalidTensorError: `weight` is no matrix, or the group size does not divide its columns.
    """
    if weight.dim() != 2 or group_size <= 0 or weight.shape[1] % group_size:
        raise _library.invalid(
            "quantize_weight",
            f"weight is {list(weight.shape)}, group_size {group_size}; expected a matrix, and a divisor of its columns",
        )
    rows, columns = weight.shape
    groups = weight.detach().to(torch.float32).reshape(rows, columns // group_size, group_size)
    scales = groups.abs().amax(dim=2) / 127
    steps = groups / torch.where(scales == 0, 1.0, scales).unsqueeze(2)
    return steps.round().clamp(-127, 127).to(torch.int8).flatten(1), scales


def dequantize_weight(weight: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What int8 weights with their scales stand for, ``[rows, in]``; arguments as in `linear`."""
    groups = weight.to(scales.dtype).reshape(*scales.shape, weight.shape[1] // scales.shape[1])
    return (groups * scales.unsqueeze(2)).flatten(1).to(dtype)


def _check(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    residual: Tensor | None,
    activation: int,
    gated: bool,
) -> None:
    if input.dtype not in DTYPES:
        raise CheckError(f"input is {input.dtype}; expected float32, bfloat16 or float16")
    if weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise CheckError(f"input is {list(input.shape)}, weight {list(weight.shape)}; expected [..., in] and [out, in]")
    rows = weight.shape[0]
    if gated and rows % 2:
        raise CheckError(f"weight has {rows} rows; expected an even number for two halves")
    check_activation(activation)
    _check_scales(weight, scales, input.dtype)
    expected = (("bias", bias, [rows]), ("residual", residual, [*input.shape[:-1], _columns(weight, gated)]))
    for name, tensor, shape in expected:
        if tensor is not None and (list(tensor.shape) != shape or tensor.dtype != input.dtype):
            raise CheckError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {input.dtype} {shape}")
    for name, tensor in {"weight": weight, "bias": bias, "scales": scales, "residual": residual}.items():
        if tensor is not None and tensor.device != input.device:
            raise CheckError(f"{name} is on {tensor.device}; expected {input.device}, where input is")


def _check_scales(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> None:
    if weight.dtype != torch.int8:
        if scales is not None or weight.dtype != dtype:
            raise CheckError(f"weight is {weight.dtype}; expected {dtype}, or int8 with scales")
        return
    rows, columns = weight.shape
    if scales is None or scales.dim() != 2 or scales.shape[0] != rows or scales.dtype != torch.float32:
        raise CheckError(f"weight is int8; expected scales in float32, [{rows}, groups]")
    if scales.shape[1] == 0 or columns % scales.shape[1]:
        raise CheckError(f"scales has {scales.shape[1]} groups; expected a divisor of {columns} columns")


def _columns(weight: Tensor, gated: bool) -> int:
    """How many outputs there are."""
    return weight.shape[0] // 2 if gated else weight.shape[0]


@_library.op(
    "linear(Tensor input, Tensor weight, Tensor? bias, Tensor? scales, Tensor? residual, int activation, bool gated) "
    "-> Tensor",
    check=_check,
    outputs=lambda input, weight, gated: input.new_empty((*input.shape[:-1], _columns(weight, gated))),
)
def linear_reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    residual: Tensor | None,
    activation: int,
    gated: bool,
) -> Tensor:
    """``ds_plugin::linear`` in plain torch, on any device; `activation` is an index into `ACTIVATIONS`."""
    dtype = working(input)
    matrix = weight.to(dtype) if scales is None else dequantize_weight(weight, scales.to(dtype), dtype)
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
    "quantize_weight",
]
