"""``ds_plugin::fused_bias_gelu`` and its derivative."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._activations import slope
from ds_plugin_sdk.ops._checks import check_first, check_other
from ds_plugin_sdk.ops._references import working
from ds_plugin_sdk.ops.transformer._parts import biased, columns_of, contiguous, empty_columns


def fused_bias_gelu(input: Tensor, bias: Tensor | None = None, *, tanh: bool = True) -> Tensor:
    """``gelu(input + bias)`` (Hendrycks & Gimpel 2016): with s the sum,

    ``s/2 (1 + tanh(sqrt(2/pi) (s + 0.044715 s^3)))``, the form of DeepSpeed's layer, or ``s/2 (1 + erf(s / sqrt 2))``.

    Args:
        input: ``[..., columns]``: float32, bfloat16, float16 (float64: reference only).
        bias: ``[columns]``, the dtype of input; nothing is added if None.
        tanh: the first form, or the second.

    Returns:
        A new contiguous tensor of input's shape and dtype.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit.
    """
    result: Tensor = _library.call("fused_bias_gelu", input, bias, tanh)
    return result


def _check(input: Tensor, bias: Tensor | None) -> None:
    check_first("input", input)
    check_other("bias", bias, input, input.shape[-1:])


def _save_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, bias, ctx.tanh = inputs
    ctx.save_for_backward(input, bias)


def _derive_gelu(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    input, bias = ctx.saved_tensors
    grad_input, grad_bias = _library.call("fused_bias_gelu_backward", grad_output, input, bias, ctx.tanh)
    return grad_input, None if bias is None else grad_bias, None


@_library.op(
    "fused_bias_gelu(Tensor input, Tensor? bias, bool tanh) -> Tensor",
    check=_check,
    outputs=lambda input: input.new_empty(input.shape),
    autograd=_library.Autograd(_derive_gelu, _save_gelu),
)
def fused_bias_gelu_reference(input: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """``ds_plugin::fused_bias_gelu`` in plain torch, on any device; arguments as in `fused_bias_gelu`."""
    s = biased(input, bias)
    return contiguous(functional.gelu(s, approximate="tanh" if tanh else "none"), input)


def _check_backward(grad_output: Tensor, input: Tensor, bias: Tensor | None) -> None:
    check_first("grad_output", grad_output)
    check_other("input", input, grad_output, grad_output.shape)
    check_other("bias", bias, grad_output, grad_output.shape[-1:])


def _new_gradients(grad_output: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return grad_output.new_empty(grad_output.shape), empty_columns(grad_output, bias is not None)


@_library.op(
    "fused_bias_gelu_backward(Tensor grad_output, Tensor input, Tensor? bias, bool tanh) -> (Tensor, Tensor)",
    check=_check_backward,
    outputs=_new_gradients,
)
def fused_bias_gelu_backward_reference(
    grad_output: Tensor, input: Tensor, bias: Tensor | None, tanh: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of input and of bias; that of bias has no elements if there was none."""
    grad = grad_output.to(working(grad_output)) * slope(biased(input, bias), "gelu_tanh" if tanh else "gelu")
    return contiguous(grad, grad_output), columns_of(grad, grad_output, bias is not None)
