"""``ds_plugin::activation_and_mul`` and its derivative."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._activations import ACTIVATIONS, Activation, activate, check_activation, number_of, slope
from ds_plugin_sdk.ops._checks import check_first, check_other
from ds_plugin_sdk.ops._references import working
from ds_plugin_sdk.ops.transformer._parts import contiguous


def activation_and_mul(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """``activation(gate) * up`` (Shazeer 2020: SwiGLU by ``silu``, GEGLU by ``gelu``, ReGLU by ``relu``).

    Both are kept for the backward pass, and nothing else. `ds_plugin_sdk.ops.activation.gated_activation` takes both in
    one tensor, and has no derivative.

    Args:
        gate: ``[..., columns]``: float32, bfloat16, float16 (float64: reference only).
        up: shape and dtype of gate.
        activation: ``identity``, ``relu``, ``gelu``, ``gelu_tanh`` or ``silu``.

    Returns:
        A new contiguous tensor of gate's shape and dtype.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or there is no such activation.
    """
    result: Tensor = _library.call("activation_and_mul", gate, up, number_of("activation_and_mul", activation))
    return result


def _check(gate: Tensor, up: Tensor, activation: int) -> None:
    check_first("gate", gate)
    check_other("up", up, gate, gate.shape)
    check_activation(activation)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _derive(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor, Tensor] = _library.call(
        "activation_and_mul_backward", grad_output, *ctx.saved_tensors, ctx.activation
    )
    return *grads, None


@_library.op(
    "activation_and_mul(Tensor gate, Tensor up, int activation) -> Tensor",
    check=_check,
    outputs=lambda gate: gate.new_empty(gate.shape),
    autograd=_library.Autograd(_derive, _save),
)
def activation_and_mul_reference(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """``ds_plugin::activation_and_mul`` in plain torch, on any device; `activation` is an index into `ACTIVATIONS`."""
    dtype = working(gate)
    return contiguous(activate(gate.to(dtype), ACTIVATIONS[activation]) * up.to(dtype), gate)


def _check_backward(grad_output: Tensor, gate: Tensor, up: Tensor, activation: int) -> None:
    check_first("grad_output", grad_output)
    check_other("gate", gate, grad_output, grad_output.shape)
    check_other("up", up, grad_output, grad_output.shape)
    check_activation(activation)


@_library.op(
    "activation_and_mul_backward(Tensor grad_output, Tensor gate, Tensor up, int activation) -> (Tensor, Tensor)",
    check=_check_backward,
    outputs=lambda grad_output: (grad_output.new_empty(grad_output.shape), grad_output.new_empty(grad_output.shape)),
)
def activation_and_mul_backward_reference(
    grad_output: Tensor, gate: Tensor, up: Tensor, activation: int
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up; `activation` is an index into `ACTIVATIONS`."""
    dtype, name = working(grad_output), ACTIVATIONS[activation]
    grad, x = grad_output.to(dtype), gate.to(dtype)
    return (
        contiguous(grad * up.to(dtype) * slope(x, name), grad_output),
        contiguous(grad * activate(x, name), grad_output),
    )
