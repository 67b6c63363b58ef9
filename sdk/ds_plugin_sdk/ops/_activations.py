"""The activations that ops know, and their numbers in schemas."""

from __future__ import annotations

from typing import Literal

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
    """An activation by its name."""
    if activation == "relu":
        return functional.relu(x)
    if activation == "gelu":
        return functional.gelu(x)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return functional.silu(x) if activation == "silu" else x.clone()
