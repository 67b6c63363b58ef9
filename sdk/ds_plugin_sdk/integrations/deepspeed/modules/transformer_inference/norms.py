"""Layer norm and RMS norm, with and without residual."""

from __future__ import annotations

from torch import Tensor

from ds_plugin_sdk.ops import norm


def layer_norm(input: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Layer norm, of gamma's dtype."""
    return norm.layer_norm(input.to(gamma.dtype), gamma, beta, eps)


def _layer_norm_residual(
    input: Tensor, bias: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, eps: float
) -> Tensor:
    """Layer norm of ``input + bias + residual``."""
    return norm.post_layer_norm(input, residual, gamma, beta, eps, input_bias=bias)


def layer_norm_residual_store_pre_ln_res(
    input: Tensor, bias: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, eps: float
) -> list[Tensor]:
    """Layer norm of ``input + bias + residual``, and that sum."""
    return list(norm.pre_layer_norm(input, residual, gamma, beta, eps, input_bias=bias))


def rms_norm(input: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """RMS norm, of gamma's dtype."""
    return norm.rms_norm(input.to(gamma.dtype), gamma, eps)


def pre_rms_norm(input: Tensor, residual: Tensor, gamma: Tensor, eps: float) -> list[Tensor]:
    """RMS norm of ``input + residual``, and that sum."""
    return list(norm.pre_rms_norm(input.to(gamma.dtype), residual.to(gamma.dtype), gamma, eps))
