"""Biases and residuals of diffusion models, channels last.

``ds_plugin::nhwc_bias_add``, ``nhwc_bias_add_add`` and ``nhwc_bias_add_bias_add``.

A backward pass through them raises `SdkError`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_first, check_other
from ds_plugin_sdk.ops._references import working


def nhwc_bias_add(activation: Tensor, bias: Tensor) -> Tensor:
    """``activation + bias`` for each channel. Arithmetic is in float32 (float64 for float64 tensors), rounded once.

    Args:
        activation: ``[batch, channels, height, width]``, best in channels-last memory format, or
            ``[batch, sequence, channels]``: float32, bfloat16, float16 (float64: reference only).
        bias: ``[channels]``, the dtype of activation.

    Returns:
        A new tensor of activation's shape and dtype, channels last if it has four dimensions, else contiguous.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit.
    """
    result: Tensor = _library.call("nhwc_bias_add", activation, bias)
    return result


def nhwc_bias_add_add(activation: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """``activation + bias + other``; `other` has activation's shape and dtype. The rest is as in `nhwc_bias_add`."""
    result: Tensor = _library.call("nhwc_bias_add_add", activation, bias, other)
    return result


def nhwc_bias_add_bias_add(activation: Tensor, bias: Tensor, other: Tensor, other_bias: Tensor) -> Tensor:
    """``(activation + bias) + (other + other_bias)``.

    `other` has activation's shape and dtype, `other_bias` those of bias. The rest is as in `nhwc_bias_add`.
    """
    result: Tensor = _library.call("nhwc_bias_add_bias_add", activation, bias, other, other_bias)
    return result


def _check(activation: Tensor, bias: Tensor, other: Tensor | None = None, other_bias: Tensor | None = None) -> None:
    check_first("activation", activation)
    if activation.dim() not in (3, 4):
        raise CheckError(
            f"activation has shape {list(activation.shape)}; "
            "expected [batch, channels, height, width] or [batch, sequence, channels]"
        )
    channels = activation.shape[1 if activation.dim() == 4 else 2]
    check_other("bias", bias, activation, (channels,))
    check_other("other", other, activation, activation.shape)
    check_other("other_bias", other_bias, activation, (channels,))


def _empty(activation: Tensor) -> Tensor:
    return torch.empty_like(activation, memory_format=_format(activation))


@_library.op("nhwc_bias_add(Tensor activation, Tensor bias) -> Tensor", check=_check, outputs=_empty)
def nhwc_bias_add_reference(activation: Tensor, bias: Tensor) -> Tensor:
    """``ds_plugin::nhwc_bias_add`` in plain torch, on any device."""
    return _rounded(_biased(activation, bias), activation)


@_library.op("nhwc_bias_add_add(Tensor activation, Tensor bias, Tensor other) -> Tensor", check=_check, outputs=_empty)
def nhwc_bias_add_add_reference(activation: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """``ds_plugin::nhwc_bias_add_add`` in plain torch, on any device."""
    return _rounded(_biased(activation, bias) + other, activation)


@_library.op(
    "nhwc_bias_add_bias_add(Tensor activation, Tensor bias, Tensor other, Tensor other_bias) -> Tensor",
    check=_check,
    outputs=_empty,
)
def nhwc_bias_add_bias_add_reference(activation: Tensor, bias: Tensor, other: Tensor, other_bias: Tensor) -> Tensor:
    """``ds_plugin::nhwc_bias_add_bias_add`` in plain torch, on any device."""
    return _rounded(_biased(activation, bias) + _biased(other, other_bias), activation)


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    dtype = working(x)
    return x.to(dtype) + bias.to(dtype).view(-1, 1, 1) if x.dim() == 4 else x.to(dtype) + bias.to(dtype)


def _format(activation: Tensor) -> torch.memory_format:
    return torch.channels_last if activation.dim() == 4 else torch.contiguous_format


def _rounded(x: Tensor, activation: Tensor) -> Tensor:
    return x.to(activation.dtype, memory_format=_format(activation), copy=True)


__all__ = ["nhwc_bias_add", "nhwc_bias_add_add", "nhwc_bias_add_bias_add"]
