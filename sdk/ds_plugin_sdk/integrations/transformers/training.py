"""What a model multiplies in training, on a CPU that torch's products leave slow.

Linear layers are those of `ds_plugin_sdk.nn.linear`. Attention is torch's own, of queries, keys and values that are
made float32 for the call, forward and backward; what is kept in between has 16 bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_plugin_sdk.integrations.deepspeed.hooks import is_linear_of_zero
from ds_plugin_sdk.integrations.transformers.replacement import TrainingReplacement
from ds_plugin_sdk.nn.linear import is_autocast, is_plain, multiplies, multiply
from ds_plugin_sdk.ops._derived_once import derived_once
from ds_plugin_sdk.ops._products import product_dtype
from ds_plugin_sdk.ops._watched import is_watched


def linear_in_training(module: nn.Module, input: object) -> Tensor | None:
    """What a linear layer gives; None if its own code is to run: it is another class's, or would be no slower."""
    transposed = type(module) is Conv1D
    if not (transposed or type(module) is nn.Linear) or type(input) is not Tensor:
        return None
    functional = torch.nn.functional.linear
    if functional is not torch._C._nn.linear and not is_linear_of_zero(functional):
        return None  # somebody counts or changes what linear layers compute
    # Whatever they are: pruned ones are computed, and no parameters.
    weight: Any = module.weight
    bias: Any = module.bias
    if not multiplies(input, weight, bias, transposed=transposed):
        return None
    return multiply(input, weight, bias, transposed=transposed)


class TrainedLinear(TrainingReplacement):
    """A linear layer within a decoder layer."""

    def in_training(self, input: Any) -> Tensor | None:
        return linear_in_training(self.module, input)


def attends_in_training(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `attention_in_training` does what torch's attention does, and sooner; shapes and dtypes must fit."""
    return (
        not is_watched(operators=False)  # they see torch's op for float32
        and torch.is_grad_enabled()
        and torch.nn.functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
        and torch._C._get_flash_sdp_enabled()  # what torch asks for the CPU, too
        and all(type(each) is Tensor and is_plain(each) and each.stride(3) == 1 for each in (query, key, value))
        and query.shape[2] > 1
        and product_dtype(query) != query.dtype
        and not is_autocast(query.device.type)
        and (mask is None or not mask.requires_grad)
    )


def attention_in_training(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Attention of ``[batch, heads, tokens, head_dim]``; fewer heads of keys and values serve several of queries each.

    Args:
        mask: bool, or what is added to the scores, ``[batch or 1, heads or 1, tokens, positions]``.
        causal: a query attends to the positions up to its own.

    Returns:
        ``[batch, heads, tokens, head_dim]``, the dtype of query, rounded once.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    result: Tensor = _Attention.apply(query, key, value, mask, causal, scale)  # type: ignore[no-untyped-call, unused-ignore]  # before 2.15 torch gives it no type
    return result


class _Attention(torch.autograd.Function):
    """What is kept has the dtypes that it was given in."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide, sums = op(*_floats(query, key, value), is_causal=causal, attn_mask=_added(mask), scale=scale)
        output: Tensor = wide.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, sums, mask)
        ctx.causal, ctx.scale = causal, scale
        return output

    @staticmethod
    @functools.partial(derived_once, "attention_in_training", nonlinear=True)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums, mask = ctx.saved_tensors
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = _floats(grads[0], query, key, value, output)
        found = op(*wide, sums, 0.0, ctx.causal, attn_mask=_added(mask), scale=ctx.scale)
        return *(each.to(query.dtype) for each in found), None, None, None


def _floats(*tensors: Tensor) -> list[Tensor]:
    return [each.to(torch.float32) for each in tensors]


def _added(mask: Tensor | None) -> Tensor | None:
    """What a mask adds to scores, float32."""
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.to(torch.float32)
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -torch.inf)


__all__ = ["TrainedLinear", "attends_in_training", "attention_in_training", "linear_in_training"]
