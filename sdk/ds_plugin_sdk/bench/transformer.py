"""The transformer layer and its ops against plain torch, eager and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_plugin_sdk.bench import timing
from ds_plugin_sdk.bench.eager import tables, turned
from ds_plugin_sdk.nn import TransformerLayer, rotary
from ds_plugin_sdk.ops import transformer
from ds_plugin_sdk.ops.rotary import angles as rotary_angles

P = 0.1  # dropped
# Batch, tokens, hidden size, heads.
SIZES = {"small": (2, 64, 256, 4), "large": (8, 128, 1024, 16)}


# Makes a tensor of a shape, with gradients.
_Made = Callable[..., Tensor]


@dataclass(frozen=True)
class _Pair:
    """What is compared: functions of the same tensors; gradients are taken of their results if there is a cotangent."""

    what: str
    passes: str  # forward, backward, or both
    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    tensors: Sequence[Tensor]
    moved: int = 0  # how often a tensor like the first must be read or written
    cotangent: Tensor | None = None


def cases(dtype: torch.dtype, compile: bool) -> Iterator[timing.Case]:
    """Every op, forward and backward, and the layer, forward and both, without dropout and with."""
    for size, sizes in SIZES.items():
        for pair in (*_ops(*sizes, dtype), *_layers(*sizes, dtype, 0.0), *_layers(*sizes, dtype, P)):
            peers = {"eager": _step(pair, pair.torchs)}
            if compile:
                peers["torch.compile"] = _step(pair, timing.compiled(pair.torchs))
            first, setting = pair.tensors[0], f"{size}, {pair.passes}"
            moved, grad = pair.moved * first.nbytes, pair.cotangent is not None
            yield timing.Case(pair.what, setting, _step(pair, pair.ours), peers, moved, grad)


def _step(pair: _Pair, function: Callable[..., Any]) -> timing.Step:
    """The forward pass without autograd; or the backward pass of an op alone; or both of the layer."""
    if pair.cotangent is None:
        return lambda: function(*pair.tensors)
    leaves = [tensor for tensor in pair.tensors if tensor.requires_grad]
    if isinstance(function, nn.Module):
        leaves += function.parameters()
    if pair.passes == "backward":
        result = functools.cache(lambda: function(*pair.tensors))
        return lambda: torch.autograd.grad(result(), leaves, pair.cotangent, retain_graph=True)
    return lambda: torch.autograd.grad(function(*pair.tensors), leaves, pair.cotangent)


def _ops(batch: int, tokens: int, hidden: int, heads: int, dtype: torch.dtype) -> Iterator[_Pair]:
    """Each op beside the lines of torch that layers have in its place."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    yield from _norms(batch, tokens, hidden, made)
    yield from _activations(batch, tokens, 4 * hidden, made)
    yield from _within_attention(batch, heads, tokens, hidden // heads, made)


def _norms(batch: int, tokens: int, hidden: int, made: _Made) -> Iterator[_Pair]:
    seed = transformer.new_seed()
    x, residual, grad = (made(batch, tokens, hidden) for _ in range(3))
    bias, weight, norm_bias = (made(hidden) for _ in range(3))
    shape = (hidden,)
    yield from _both(
        "layer norm",
        lambda x, w, b: transformer.dropout_add_layer_norm(x, w, b)[0],
        lambda x, w, b: functional.layer_norm(x, shape, w, b),
        (x, weight, norm_bias),
        (2, 3),
        grad,
    )
    yield from _both(
        "bias, dropout, residual, layer norm",
        lambda x, r, c, w, b: transformer.dropout_add_layer_norm(x, w, b, r, bias=c, p=P, seed=seed)[0],
        lambda x, r, c, w, b: functional.layer_norm(r + functional.dropout(x + c, P), shape, w, b),
        (x, residual, bias, weight, norm_bias),
        (4, 4),
        grad,
    )
    yield from _both(
        "residual, RMS norm",
        lambda x, r, w: transformer.add_rms_norm(x, w, r)[0],
        lambda x, r, w: functional.rms_norm(x + r, shape, w, 1e-6),
        (x, residual, weight),
        (4, 3),
        grad,
    )


def _activations(batch: int, tokens: int, columns: int, made: _Made) -> Iterator[_Pair]:
    gate, up, grad = (made(batch, tokens, columns) for _ in range(3))
    yield from _both(
        "silu(gate) up",
        transformer.activation_and_mul,
        lambda gate, up: functional.silu(gate) * up,
        (gate, up),
        (3, 5),
        grad,
    )
    bias = made(columns)
    for name, tanh in (("tanh", True), ("erf", False)):
        approximate = "tanh" if tanh else "none"
        yield from _both(
            f"bias, gelu ({name})",
            lambda x, b, tanh=tanh: transformer.fused_bias_gelu(x, b, tanh=tanh),
            lambda x, b, approximate=approximate: functional.gelu(x + b, approximate=approximate),
            (gate, bias),
            (2, 3),
            grad,
        )


def _within_attention(batch: int, heads: int, tokens: int, head_dim: int, made: _Made) -> Iterator[_Pair]:
    query, angles = made(batch, heads, tokens, head_dim), rotary_angles(torch.arange(tokens), head_dim)
    cos, sin = tables(*angles, query.dtype)
    yield from _both(
        "rotary embedding",
        lambda q: rotary(q, *angles),
        functools.partial(turned, cos=cos, sin=sin),
        (query,),
        (2, 2),
        made(*query.shape),
    )
    scores, seed = made(batch, heads, tokens, tokens), transformer.new_seed()
    mask = torch.zeros(batch, 1, 1, tokens, dtype=scores.dtype)
    yield from _both(
        "mask, softmax, dropout",
        lambda s, m: transformer.masked_softmax_dropout(s, m, scale=0.125, p=P, seed=seed),
        lambda s, m: functional.dropout(functional.softmax(s * 0.125 + m, dim=-1), P),
        (scores, mask),
        (3, 3),
        made(batch, heads, tokens, tokens),
    )


def _both(
    what: str,
    ours: Callable[..., Any],
    torchs: Callable[..., Any],
    tensors: Sequence[Tensor],
    moved: tuple[int, int],
    grad: Tensor,
) -> Iterator[_Pair]:
    """Forward and backward of an op, which move `moved` tensors like the first."""
    yield _Pair(what, "forward", ours, torchs, [tensor.detach() for tensor in tensors], moved[0])
    yield _Pair(what, "backward", ours, torchs, tensors, moved[1], grad.detach())


def _layers(batch: int, tokens: int, hidden: int, heads: int, dtype: torch.dtype, p: float) -> Iterator[_Pair]:
    """BERT's layer; torch's own with the same formulas beside it."""
    ours = TransformerLayer(hidden, heads, attn_dropout=p, hidden_dropout=p, pre_layer_norm=False, dtype=dtype)
    gelu = functools.partial(functional.gelu, approximate="tanh")
    torchs = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, p, gelu, batch_first=True, dtype=dtype)
    x, grad = torch.randn(batch, tokens, hidden).to(dtype), torch.randn(batch, tokens, hidden).to(dtype)
    mask = torch.zeros(batch, 1, 1, tokens, dtype=dtype)
    layers = _Masked(ours, attention_mask=mask), _Masked(torchs, src_key_padding_mask=mask[:, 0, 0])
    yield _Pair(f"layer, p {p}", "layer forward", *layers, [x])
    yield _Pair(f"layer, p {p}", "layer forward+backward", *layers, [x.clone().requires_grad_()], cotangent=grad)


class _Masked(nn.Module):
    def __init__(self, layer: nn.Module, **mask: Tensor) -> None:
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, **self.mask)
