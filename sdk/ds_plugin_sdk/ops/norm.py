"""Layer norm and RMS norm for inference, with what is added before them.

``ds_plugin::layer_norm``, ``pre_layer_norm``, ``post_layer_norm``, ``rms_norm`` and ``pre_rms_norm``.

A backward pass through them raises `SdkError`: the functions of `ds_plugin_sdk.nn` have derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import check_first, check_other
from ds_plugin_sdk.ops._references import working


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension (Ba et al. 2016).

    The variance is that of the row itself, divided by its length. Arithmetic is in float32 (float64 for float64
    tensors), rounded once, as in all ops of this module.

    Args:
        input: x, ``[..., columns]``: float32, bfloat16, float16 (float64: reference only).
        weight, bias: ``[columns]``, the dtype of input.
        eps: added to the variance.

    Returns:
        A new contiguous tensor of input's shape and dtype.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit.
    """
    result: Tensor = _library.call("layer_norm", input, weight, bias, eps)
    return result


def post_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    *,
    input_bias: Tensor | None = None,
) -> Tensor:
    """`layer_norm` of ``input + residual + input_bias``.

    Args:
        residual: shape and dtype of input.
        input_bias: ``[columns]``, the dtype of input; nothing is added if None.

    The rest is as in `layer_norm`.
    """
    result: Tensor = _library.call("post_layer_norm", input, residual, input_bias, weight, bias, eps)
    return result


def pre_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    *,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`post_layer_norm` and the sum that it is of, which a later layer adds to: ``(normalised, sum)``.

    The norm is taken of the sum before that is rounded. Arguments as in `post_layer_norm`.
    """
    result: tuple[Tensor, Tensor] = _library.call("pre_layer_norm", input, residual, input_bias, weight, bias, eps)
    return result


def rms_norm(input: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)`` over the last dimension (Zhang & Sennrich 2019).

    Args:
        weight_offset: 1 for models that keep what a weight differs from 1 by, as Gemma's do.

    The rest is as in `layer_norm`.
    """
    result: Tensor = _library.call("rms_norm", input, weight, eps, weight_offset)
    return result


def pre_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`rms_norm` of ``input + residual``, and that sum: ``(normalised, sum)``, as in `pre_layer_norm`."""
    result: tuple[Tensor, Tensor] = _library.call("pre_rms_norm", input, residual, weight, eps)
    return result


def _check(
    input: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    input_bias: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    check_first("input", input)
    columns = input.shape[-1:]
    check_other("weight", weight, input, columns)
    check_other("residual", residual, input, input.shape)
    check_other("input_bias", input_bias, input, columns)
    check_other("bias", bias, input, columns)


def _normalised(input: Tensor) -> Tensor:
    return input.new_empty(input.shape)


def _normalised_and_sum(input: Tensor) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape), input.new_empty(input.shape)


_WITH_RESIDUAL = "Tensor input, Tensor residual, Tensor? input_bias, Tensor weight, Tensor bias, float eps"


@_library.op(
    "layer_norm(Tensor input, Tensor weight, Tensor bias, float eps) -> Tensor", check=_check, outputs=_normalised
)
def layer_norm_reference(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``ds_plugin::layer_norm`` in plain torch, on any device."""
    return _layer_norm(input.to(working(input)), weight, bias, eps)


@_library.op(f"post_layer_norm({_WITH_RESIDUAL}) -> Tensor", check=_check, outputs=_normalised)
def post_layer_norm_reference(
    input: Tensor, residual: Tensor, input_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """``ds_plugin::post_layer_norm`` in plain torch, on any device."""
    return _layer_norm(_sum(input, residual, input_bias), weight, bias, eps)


@_library.op(f"pre_layer_norm({_WITH_RESIDUAL}) -> (Tensor, Tensor)", check=_check, outputs=_normalised_and_sum)
def pre_layer_norm_reference(
    input: Tensor, residual: Tensor, input_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``ds_plugin::pre_layer_norm`` in plain torch, on any device."""
    total = _sum(input, residual, input_bias)
    return _layer_norm(total, weight, bias, eps), _rounded(total, input)


@_library.op(
    "rms_norm(Tensor input, Tensor weight, float eps, float weight_offset=0.) -> Tensor",
    check=_check,
    outputs=_normalised,
)
def rms_norm_reference(input: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """``ds_plugin::rms_norm`` in plain torch, on any device."""
    return _rms_norm(input.to(working(input)), weight, eps, weight_offset)


@_library.op(
    "pre_rms_norm(Tensor input, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    check=_check,
    outputs=_normalised_and_sum,
)
def pre_rms_norm_reference(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``ds_plugin::pre_rms_norm`` in plain torch, on any device."""
    total = _sum(input, residual, None)
    return _rms_norm(total, weight, eps), _rounded(total, input)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    centred = centred - centred.mean(dim=-1, keepdim=True)  # what rounding took from the mean of a row far from zero
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    return _rounded(centred * torch.rsqrt(variance + eps) * weight.to(x.dtype) + bias.to(x.dtype), weight)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    wide = weight.to(x.dtype) + weight_offset
    return _rounded(x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps) * wide, weight)


def _sum(input: Tensor, residual: Tensor, input_bias: Tensor | None) -> Tensor:
    dtype = working(input)
    total = input.to(dtype) + residual.to(dtype)
    return total if input_bias is None else total + input_bias.to(dtype)


def _rounded(x: Tensor, like: Tensor) -> Tensor:
    """A new contiguous tensor, which the op may return."""
    return x.to(like.dtype, memory_format=torch.contiguous_format, copy=True)


__all__ = ["layer_norm", "post_layer_norm", "pre_layer_norm", "pre_rms_norm", "rms_norm"]
