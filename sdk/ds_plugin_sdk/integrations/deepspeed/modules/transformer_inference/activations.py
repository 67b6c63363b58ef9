"""Activations after a bias, plain and gated."""

from __future__ import annotations

from torch import Tensor

from ds_plugin_sdk.errors import OpError
from ds_plugin_sdk.ops.activation import Activation, bias_activation, bias_activation_
from ds_plugin_sdk.ops.activation import gated_activation as gated

# deepspeed.utils.types.ActivationFuncType
ACTIVATIONS: dict[int, Activation] = {1: "gelu_tanh", 2: "relu"}
GATES: dict[int, Activation] = {3: "gelu", 4: "silu"}


def bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    """GELU by tanh of ``input + bias``, in place where `input` is contiguous."""
    return _bias_activation(input, bias, "gelu_tanh")


def bias_relu(input: Tensor, bias: Tensor) -> Tensor:
    """ReLU of ``input + bias``, in place where `input` is contiguous."""
    return _bias_activation(input, bias, "relu")


def bias_add(input: Tensor, bias: Tensor) -> Tensor:
    """``input + bias``, in place where `input` is contiguous."""
    return _bias_activation(input, bias, "identity")


def _bias_activation(input: Tensor, bias: Tensor, activation: Activation) -> Tensor:
    return (bias_activation_ if input.is_contiguous() else bias_activation)(input, bias.flatten(), activation)


def gated_activation(input: Tensor, bias: Tensor, activation: int) -> Tensor:
    """First half of ``input + bias`` times the activation of the second: 3 is GELU (by erf), 4 is SiLU."""
    return gated(input, bias.flatten(), chosen(GATES, activation))


def chosen(known: dict[int, Activation], number: int) -> Activation:
    try:
        return known[int(number)]
    except KeyError:
        raise OpError(
            "there is no such activation",
            op="transformer_inference",
            why=f"its number is {int(number)}; known here: {', '.join(f'{n} ({name})' for n, name in known.items())}",
        ) from None
