"""The activations that ops know, and their numbers in schemas."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError

Activation = Literal["identity", "relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: tuple[Activation, ...] = ("identity", "relu", "gelu", "gelu_tanh", "silu")


def number_of(op: str, activation: Activation) -> int:
    """The index into `ACTIVATIONS`, as schemas have it.

    Raises:
        InvalidTensorError: there is no such activation.
    """
    if activation not in ACTIVATIONS:
        raise _library.invalid(op, f"activation is '{activation}'; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.index(activation)


def check_activation(activation: int) -> None:
    """Check that an index is one into `ACTIVATIONS`."""
    if not 0 <= activation < len(ACTIVATIONS):
        raise CheckError(f"activation is {activation}; expected 0 to {len(ACTIVATIONS) - 1}")


def activate(x: Tensor, activation: Activation) -> Tensor:
    """``activation(x)``, as a new tensor of x's shape and dtype (floating-point).

    Raises:
        InvalidTensorError: there is no such activation; `ACTIVATIONS` has their names.
    """
    number_of("activate", activation)
    if activation == "relu":
        return functional.relu(x)
    if activation == "gelu":
        return functional.gelu(x)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return functional.silu(x) if activation == "silu" else x.clone()


def slope(x: Tensor, activation: Activation) -> Tensor:
    """The derivative of an activation; that of relu at 0 is 0."""
    # Far out, where a factor is 0, the others may be infinite.
    if activation == "relu":
        return (x > 0).to(x.dtype)
    if activation == "gelu_tanh":
        t = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        return 0.5 * (1 + t) + torch.where(t.abs() == 1, 0.0, 0.5 * x * (1 - t * t) * inner)
    if activation == "gelu":
        density = torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + torch.where(density == 0, 0.0, x * density)
    if activation == "silu":
        s = torch.sigmoid(x)
        rest = s * (1 - s)
        return s + torch.where(rest == 0, 0.0, x * rest)
    return torch.ones_like(x)
