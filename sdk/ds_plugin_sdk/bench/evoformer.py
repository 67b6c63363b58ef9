"""Attention of the Evoformer with both biases, forward and backward, against the same in torch, by hand and by SDPA."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ds_plugin_sdk.bench.timing import Case
from ds_plugin_sdk.ops import evoformer_attn

# Rows, tokens, heads, size of a head: an alignment's sequences, and the pairs of a short protein.
SETTINGS = {"64 rows of 128": (64, 128, 8, 32), "32 rows of 256": (32, 256, 4, 32)}


def cases(dtype: torch.dtype, compile: bool) -> Iterator[Case]:
    """Both passes beside torch, which has all scores in memory by hand, or both biases for SDPA; `compile` changes
    nothing.
    """
    for setting, (rows, tokens, heads, size) in SETTINGS.items():
        yield from _both(rows, tokens, heads, size, dtype, setting)


def _both(rows: int, tokens: int, heads: int, size: int, dtype: torch.dtype, setting: str) -> Iterator[Case]:
    query, key, value, grad = (torch.randn(1, rows, tokens, heads, size).to(dtype) for _ in range(4))
    mask, pair = torch.randn(1, rows, tokens).to(dtype), torch.randn(1, heads, tokens, tokens).to(dtype)
    given = [query, key, value, mask, pair]
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    output, sums = evoformer_attn.evoformer_attention(*given)
    peers = {"torch": _eager, "SDPA": _sdpa}

    def backward() -> evoformer_attn.Gradients:
        return evoformer_attn.evoformer_attention_backward(
            grad, query, key, value, output, sums, mask, pair, mask_grad=True, pair_grad=True
        )

    def gradients(result: Tensor) -> object:
        return torch.autograd.grad(result, leaves, grad, retain_graph=True)

    yield Case(
        "forward",
        setting,
        lambda: evoformer_attn.evoformer_attention(*given),
        {name: partial(peer, *given) for name, peer in peers.items()},
    )
    theirs = {name: partial(gradients, peer(*leaves)) for name, peer in peers.items()}
    yield Case("backward", setting, backward, theirs, grad=True)


def _eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, pair: Tensor) -> Tensor:
    q, k, v = (x.transpose(-2, -3) for x in (query, key, value))
    scores = q @ k.transpose(-1, -2) * query.shape[-1] ** -0.5 + mask[:, :, None, None] + pair[:, None]
    return (torch.softmax(scores, dim=-1) @ v).transpose(-2, -3)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, pair: Tensor) -> Tensor:
    q, k, v = (x.transpose(-2, -3) for x in (query, key, value))
    bias = mask[:, :, None, None] + pair[:, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(-2, -3)
