"""What a call costs: the ops that are called most, on so little work that the call takes the time, beside torch's own.

Optimizers step one tensor of 16 elements, as DeepSpeed's front end calls them for each parameter; the rest has one
row, token or head of 16 elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.bench.eager import fused_adamw, tables, turned
from ds_plugin_sdk.bench.timing import Case, Step
from ds_plugin_sdk.integrations.deepspeed.modules import cpu_adam, fused_adam
from ds_plugin_sdk.ops import activation, attention, linear, norm, rotary, softmax

SIZE = 16
OPTIMIZERS = ("cpu_adam.adam_update", "fused_adam.multi_tensor_adam")
_LR, _BETA1, _BETA2, _EPS, _DECAY, _STEP = 1e-3, 0.9, 0.999, 1e-8, 0.01, 10


def cases(dtype: torch.dtype, compile: bool) -> Iterator[Case]:
    """The optimizers' steps, then one op of each family that a token of a language model meets."""
    for name, ours, theirs in (*_optimizers(dtype), *_rows(dtype), *_tokens(dtype)):
        yield Case(name, f"{SIZE} elements", ours, {"torch": theirs})


def _optimizers(dtype: torch.dtype) -> Iterator[tuple[str, Step, Step]]:
    for name, ours in zip(OPTIMIZERS, (_cpu_adam, _fused_adam), strict=True):
        yield name, ours(*_states(dtype)), _torch_adam(*_states(dtype))


def _states(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A parameter, its gradient, and its moments."""
    return torch.randn(SIZE, dtype=dtype), torch.randn(SIZE, dtype=dtype), *torch.zeros(2, SIZE, dtype=dtype)


def _cpu_adam(param: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Step:
    number = -1  # no optimizer of a user's has it
    cpu_adam.create_adam(number, _LR, _BETA1, _BETA2, _EPS, _DECAY, True, False)
    return lambda: cpu_adam.adam_update(
        number, _STEP, _LR, _BETA1, _BETA2, _EPS, _DECAY, True, param, grad, first, second
    )


def _fused_adam(param: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Step:
    lists, overflow = [[grad], [param], [first], [second]], torch.zeros(1, dtype=torch.int32)
    return lambda: fused_adam.multi_tensor_adam(
        2048, overflow, lists, _LR, _BETA1, _BETA2, _EPS, _STEP, 1, True, _DECAY
    )


def _torch_adam(param: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Step:
    step = [torch.tensor(float(_STEP))]
    lists = [param], [grad], [first], [second]
    return lambda: fused_adamw(*lists, step, lr=_LR, betas=(_BETA1, _BETA2), eps=_EPS, weight_decay=_DECAY)


def _rows(dtype: torch.dtype) -> Iterator[tuple[str, Step, Step]]:
    row, weight, bias = torch.randn(3, SIZE, dtype=dtype)
    row, shape, scores = row.view(1, SIZE), (SIZE,), torch.randn(1, 1, 1, SIZE, dtype=dtype)
    yield (
        "layer_norm",
        lambda: norm.layer_norm(row, weight, bias),
        lambda: functional.layer_norm(row, shape, weight, bias),
    )
    yield "rms_norm", lambda: norm.rms_norm(row, weight), lambda: functional.rms_norm(row, shape, weight, 1e-6)
    yield (
        "pre_rms_norm",
        lambda: norm.pre_rms_norm(row, row, weight),
        lambda: (functional.rms_norm(total := row + row, shape, weight, 1e-6), total),
    )
    yield "softmax", lambda: softmax.softmax(scores), lambda: functional.softmax(scores, dim=-1)
    yield (
        "bias_activation",
        lambda: activation.bias_activation(row, bias, "gelu"),
        lambda: functional.gelu(row + bias),
    )
    yield "gated_activation", lambda: activation.gated_activation(row), _gated(row)


def _gated(row: Tensor) -> Step:
    def step() -> Tensor:
        first, second = row.chunk(2, dim=-1)
        return first * functional.silu(second)

    return step


def _tokens(dtype: torch.dtype) -> Iterator[tuple[str, Step, Step]]:
    token, weight = torch.randn(1, SIZE, dtype=dtype), torch.randn(SIZE, SIZE, dtype=dtype)
    head = torch.randn(1, 1, 1, SIZE, dtype=dtype)
    keys, values = torch.zeros(2, 1, 1, 8, SIZE, dtype=dtype)
    cos, sin = rotary.angles(torch.tensor([[4]]), SIZE)
    yield "linear", lambda: linear.linear(token, weight), lambda: functional.linear(token, weight)
    whole = tables(cos, sin, dtype)
    yield "rotary", lambda: rotary.rotary(head, cos, sin), lambda: turned(head, *whole)
    yield (
        "cached_attention",
        lambda: attention.cached_attention(head, head, head, keys, values, 4),
        _attention(head, keys, values),
    )


def _attention(head: Tensor, keys: Tensor, values: Tensor) -> Step:
    def step() -> Tensor:
        keys[:, :, 4:5] = head
        values[:, :, 4:5] = head
        return functional.scaled_dot_product_attention(head, keys[:, :, :5], values[:, :, :5])

    return step


__all__ = ["cases"]
