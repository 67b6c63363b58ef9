"""Activations with their bias, and gated activations.

``ds_plugin::bias_activation``, in place ``bias_activation_``, and ``gated_activation``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library, _tensors
from ds_plugin_sdk.ops._multi_tensor import mark_modified
from ds_plugin_sdk.ops.linear import ACTIVATIONS, Activation, activate


def bias_activation(input: Tensor, bias: Tensor | None = None, activation: Activation = "identity") -> Tensor:
    """``activation(input + bias)``.

    ``gelu`` is that with the error function, ``gelu_tanh`` its approximation by tanh (Hendrycks & Gimpel 2016),
    ``silu`` is ``x / (1 + exp(-x))``. Arithmetic is in float32 (float64 for float64 tensors), rounded once.

    Args:
        input: ``[..., columns]``: float32, bfloat16, float16 (float64 by the reference alone).
        bias: ``[columns]``, the dtype of input; nothing is added if None.
        activation: ``identity``, ``relu``, ``gelu``, ``gelu_tanh`` or ``silu``.

    Returns:
        A new contiguous tensor of input's shape and dtype.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or there is no such activation.
    """
    result: Tensor = _library.call("bias_activation", input, bias, _index("bias_activation", activation))
    return result


def bias_activation_(input: Tensor, bias: Tensor | None = None, activation: Activation = "identity") -> Tensor:
    """`bias_activation` in place; returns `input`. Autograd does not record it.

    Raises:
        InvalidTensorError: as `bias_activation`, or elements of input share memory; nothing was modified.
    """
    _library.call("bias_activation_", input, bias, _index("bias_activation_", activation))
    mark_modified([input])
    return input


def gated_activation(input: Tensor, bias: Tensor | None = None, activation: Activation = "silu") -> Tensor:
    """``first * activation(second)`` of the two halves of ``input + bias`` (Shazeer 2020: SwiGLU, GEGLU, ReGLU).

    Args:
        input: ``[..., 2 * columns]``: float32, bfloat16, float16 (float64 by the reference alone).
        bias: ``[2 * columns]``, the dtype of input; nothing is added if None.
        activation: of the second half, as in `bias_activation`.

    Returns:
        A new tensor ``[..., columns]`` of input's dtype.

    Raises:
        InvalidTensorError: as `bias_activation`, or the number of columns is odd.
    """
    result: Tensor = _library.call("gated_activation", input, bias, _index("gated_activation", activation))
    return result


@torch.no_grad()
def bias_activation_reference(input: Tensor, bias: Tensor | None, activation: int) -> Tensor:
    """``ds_plugin::bias_activation`` in plain torch, on any device; `activation` is an index into `ACTIVATIONS`."""
    _check("bias_activation", input, bias, activation)
    return activate(_sum(input, bias), ACTIVATIONS[activation]).to(input.dtype)


@torch.no_grad()
def bias_activation_in_place_reference(input: Tensor, bias: Tensor | None, activation: int) -> None:
    """``ds_plugin::bias_activation_`` in plain torch, on any device."""
    _check("bias_activation_", input, bias, activation)
    _tensors.check_written("bias_activation_", "input", input)
    input.copy_(activate(_sum(input, bias), ACTIVATIONS[activation]))


@torch.no_grad()
def gated_activation_reference(input: Tensor, bias: Tensor | None, activation: int) -> Tensor:
    """``ds_plugin::gated_activation`` in plain torch, on any device."""
    _check_gated(input, bias, activation)
    first, second = _sum(input, bias).chunk(2, dim=-1)
    return (first * activate(second, ACTIVATIONS[activation])).to(input.dtype)


def _sum(input: Tensor, bias: Tensor | None) -> Tensor:
    x = input.to(_tensors.working(input), memory_format=torch.contiguous_format)
    return x if bias is None else x + bias.to(x.dtype)


def _index(op: str, activation: Activation) -> int:
    if activation not in ACTIVATIONS:
        raise _library.invalid(op, f"activation is '{activation}'; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.index(activation)


def _check(op: str, input: Tensor, bias: Tensor | None, activation: int) -> None:
    _tensors.check_first(op, "input", input)
    _tensors.check(op, "bias", bias, input, input.shape[-1:])
    if not 0 <= activation < len(ACTIVATIONS):
        raise _library.invalid(op, f"activation is {activation}; expected 0 to {len(ACTIVATIONS) - 1}")


def _check_gated(input: Tensor, bias: Tensor | None, activation: int) -> None:
    _check("gated_activation", input, bias, activation)
    if input.shape[-1] % 2:
        raise _library.invalid(
            "gated_activation", f"input has {input.shape[-1]} columns; expected an even number for two halves"
        )


def _fake(input: Tensor, bias: Tensor | None, activation: int) -> Tensor:
    _check("bias_activation", input, bias, activation)
    return input.new_empty(input.shape)


def _fake_in_place(input: Tensor, bias: Tensor | None, activation: int) -> None:
    _check("bias_activation_", input, bias, activation)


def _fake_gated(input: Tensor, bias: Tensor | None, activation: int) -> Tensor:
    _check_gated(input, bias, activation)
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2))


_library.define(
    "bias_activation(Tensor input, Tensor? bias, int activation) -> Tensor",
    reference=bias_activation_reference,
    fake=_fake,
)
_library.define(
    "bias_activation_(Tensor(a!) input, Tensor? bias, int activation) -> ()",
    reference=bias_activation_in_place_reference,
    fake=_fake_in_place,
)
_library.define(
    "gated_activation(Tensor input, Tensor? bias, int activation) -> Tensor",
    reference=gated_activation_reference,
    fake=_fake_gated,
)

__all__ = ["ACTIVATIONS", "Activation", "bias_activation", "bias_activation_", "gated_activation"]
