"""``inference_core_ops``: what the layers of DeepSpeed's second inference engine call (its ``InferenceCoreBuilder``).

Every function writes into tensors that the caller brings; results may lie where arguments lie. Positions of arguments
are DeepSpeed's; unused ones (scratch memory, the split of a product) are named and ignored. In memory FP6 weights have
a format of our own, since nobody but `preprocess_weight` and `cuda_wf6af16_linear` sees it; sizes are DeepSpeed's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.errors import OpError
from ds_plugin_sdk.ops import activation as activations
from ds_plugin_sdk.ops import fp6, norm
from ds_plugin_sdk.ops.linear import Activation, linear

# deepspeed.inference.v2.inference_utils.ActivationType; its GELU is the approximation by tanh.
_ACTIVATIONS: dict[int, Activation] = {0: "gelu_tanh", 1: "relu", 2: "silu", 6: "identity"}
_GATES: dict[int, Activation] = {3: "gelu_tanh", 4: "relu", 5: "silu"}


def create_handle() -> None:
    """What a GPU's BLAS would need."""


def blas_linear(output: Tensor, hidden_states: Tensor, weights: Tensor) -> None:
    """``output = hidden_states @ weights.T``; weights are ``[out, in]``."""
    output.copy_(linear(hidden_states, weights).view(output.shape))


def blas_4d_matmul(output: Tensor, right: Tensor, left: Tensor) -> None:
    """``output = left @ right`` for ``[..., n, k]`` and ``[..., k, m]``; the right factor comes first."""
    output.copy_(torch.matmul(left, right))


def preprocess_weight(weight: Tensor) -> list[Tensor]:
    """The upper two and the lower four bits of FP6 weights, uint8: see `ds_plugin_sdk.ops.fp6.fp6_pack`.

    Args:
        weight: ``[out, in]``, float16, values that FP6 has.

    Raises:
        InvalidTensorError: it is something else; nonzero values are of size 1/16 to 28.
    """
    return list(fp6.fp6_pack(weight))


def cuda_wf6af16_linear(
    output: Tensor,
    hidden_states: Tensor,
    weights_2bit: Tensor,
    weights_4bit: Tensor,
    scales: Tensor,
    workspace: Tensor,
    out_channels: int,
    tokens: int,
    in_channels: int,
    split_k: int,
) -> None:
    """``output = hidden_states @ (scales * weights).T``, of weights from `preprocess_weight`; scales are ``[out]``.

    DeepSpeed's name: FP6 weights, 16-bit activations. Its scales come as ``[out, 1]``.
    """
    result = fp6.fp6_linear(hidden_states, weights_2bit, weights_4bit, scales.flatten())
    output.copy_(result.view(output.shape))


def layer_norm(output: Tensor, input: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> None:
    """``output = LN(input)``."""
    output.copy_(norm.layer_norm(input, gamma, beta, epsilon))


def pre_layer_norm(
    output_residual: Tensor,
    output_hidden: Tensor,
    residual: Tensor,
    hidden: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
) -> None:
    """``output_residual = residual + hidden``, and its LN in `output_hidden`."""
    normed, total = norm.pre_layer_norm(residual, hidden, gamma, beta, epsilon)
    output_residual.copy_(total)
    output_hidden.copy_(normed)


def post_layer_norm(output: Tensor, input: Tensor, hidden: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> None:
    """``output = LN(input + hidden)``."""
    output.copy_(norm.post_layer_norm(input, hidden, gamma, beta, epsilon))


def rms_norm(output: Tensor, input: Tensor, gamma: Tensor, epsilon: float) -> None:
    """``output = RMS(input)``."""
    output.copy_(norm.rms_norm(input, gamma, epsilon))


def rms_pre_norm(
    output_hidden: Tensor, output_residual: Tensor, hidden: Tensor, residual: Tensor, gamma: Tensor, epsilon: float
) -> None:
    """``output_residual = residual + hidden``, and its RMS norm in `output_hidden`, which here comes first."""
    normed, total = norm.pre_rms_norm(residual, hidden, gamma, epsilon)
    output_residual.copy_(total)
    output_hidden.copy_(normed)


def bias_activation(activation: Tensor, bias: Tensor | None, act_fn: int) -> None:
    """``activation = act(activation + bias)``, in place."""
    activations.bias_activation_(activation, bias, _named("bias_activation", _ACTIVATIONS, act_fn))


def gated_activation(output: Tensor, input: Tensor, bias: Tensor | None, act_fn: int) -> None:
    """``output[i] = act(x[2 i]) * x[2 i + 1]`` with ``x = input + bias``: gate and factor lie next to each other."""
    gate = _named("gated_activation", _GATES, act_fn)
    halves = None if bias is None else _halves(bias)
    output.copy_(activations.gated_activation(_halves(input), halves, gate))


def _halves(pairs: Tensor) -> Tensor:
    """Columns (gate, factor) of each pair -> all factors, then all gates, as our op takes them."""
    return pairs.reshape(*pairs.shape[:-1], -1, 2).flip(-1).transpose(-1, -2).flatten(-2)


def _named(op: str, names: dict[int, Activation], act_fn: int) -> Activation:
    if act_fn not in names:
        raise OpError(
            f"activation {act_fn} is not one of this function's",
            op=op,
            why=f"DeepSpeed's ActivationType has {sorted(names)} for it",
        )
    return names[act_fn]
