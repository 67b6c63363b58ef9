"""Activations with their bias, and gated activations.

``ds_plugin::bias_activation``, in place ``bias_activation_``, and ``gated_activation``.

A backward pass through them raises `SdkError`: the functions of `ds_plugin_sdk.nn` have derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._activations import ACTIVATIONS, Activation, activate, check_activation, number_of
from ds_plugin_sdk.ops._checks import CheckError, check_first, check_other, check_written
from ds_plugin_sdk.ops._references import working


def bias_activation(input: Tensor, bias: Tensor | None = None, activation: Activation = "identity") -> Tensor:
    """``activation(input + bias)``.

    ``gelu`` is that with the error function, ``gelu_tanh`` its approximation by tanh (Hendrycks & Gimpel 2016),
    ``silu`` is ``x / (1 + exp(-x))``. Arithmetic is in float32 (float64 for float64 tensors), rounded once.

    Args:
        input: ``[..., columns]``: float32, bfloat16, float16 (float64: reference only).
        bias: ``[columns]``, the dtype of input; nothing is added if None.
        activation: ``identity``, ``relu``, ``gelu``, ``gelu_tanh`` or ``silu``.

    Returns:
        A new contiguous tensor of input's shape and dtype.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or there is no such activation.
    """
    result: Tensor = _library.call("bias_activation", input, bias, number_of("bias_activation", activation))
    return result


def bias_activation_(input: Tensor, bias: Tensor | None = None, activation: Activation = "identity") -> Tensor:
    """`bias_activation` in place; returns `input`. A backward pass through it raises `SdkError`.

    Raises:
        InvalidTensorError: as `bias_activation`, or elements of input share memory; nothing was modified.
    """
    _library.call("bias_activation_", input, bias, number_of("bias_activation_", activation))
    _library.mark_modified([input])
    return input


def gated_activation(input: Tensor, bias: Tensor | None = None, activation: Activation = "silu") -> Tensor:
    """``first * activation(second)`` of the two halves of ``input + bias`` (Shazeer 2020: SwiGLU, GEGLU, ReGLU).

    Args:
        input: ``[..., 2 * columns]``: float32, bfloat16, float16 (float64: reference only).
        bias: ``[2 * columns]``, the dtype of input; nothing is added if None.
        activation: of the second half, as in `bias_activation`.

    Returns:
        A new tensor ``[..., columns]`` of input's dtype.

    Raises:
        InvalidTensorError: as `bias_activation`, or the number of columns is odd.
    """
    result: Tensor = _library.call("gated_activation", input, bias, number_of("gated_activation", activation))
    return result


def _check(input: Tensor, bias: Tensor | None, activation: int) -> None:
    check_first("input", input)
    check_other("bias", bias, input, input.shape[-1:])
    check_activation(activation)


def _check_gated(input: Tensor, bias: Tensor | None, activation: int) -> None:
    _check(input, bias, activation)
    if input.shape[-1] % 2:
        raise CheckError(f"input has {input.shape[-1]} columns; expected an even number for two halves")


@_library.op(
    "bias_activation(Tensor input, Tensor? bias, int activation) -> Tensor",
    check=_check,
    outputs=lambda input: input.new_empty(input.shape),
)
def bias_activation_reference(input: Tensor, bias: Tensor | None, activation: int) -> Tensor:
    """``ds_plugin::bias_activation`` in plain torch, on any device; `activation` is an index into `ACTIVATIONS`."""
    return activate(_sum(input, bias), ACTIVATIONS[activation]).to(input.dtype)


@_library.op("bias_activation_(Tensor(a!) input, Tensor? bias, int activation) -> ()", check=_check)
def bias_activation_in_place_reference(input: Tensor, bias: Tensor | None, activation: int) -> None:
    """``ds_plugin::bias_activation_`` in plain torch, on any device."""
    check_written("input", input)
    input.copy_(activate(_sum(input, bias), ACTIVATIONS[activation]))


@_library.op(
    "gated_activation(Tensor input, Tensor? bias, int activation) -> Tensor",
    check=_check_gated,
    outputs=lambda input: input.new_empty((*input.shape[:-1], input.shape[-1] // 2)),
)
def gated_activation_reference(input: Tensor, bias: Tensor | None, activation: int) -> Tensor:
    """``ds_plugin::gated_activation`` in plain torch, on any device."""
    first, second = _sum(input, bias).chunk(2, dim=-1)
    return (first * activate(second, ACTIVATIONS[activation])).to(input.dtype)


def _sum(input: Tensor, bias: Tensor | None) -> Tensor:
    x = input.to(working(input), memory_format=torch.contiguous_format)
    return x if bias is None else x + bias.to(x.dtype)


__all__ = ["ACTIVATIONS", "Activation", "bias_activation", "bias_activation_", "gated_activation"]
