"""The inference ops against the same in torch, eager and compiled: one token of a batch, and a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.bench import timing
from ds_plugin_sdk.bench.eager import tables, turned
from ds_plugin_sdk.ops import activation, norm, residual, rotary, softmax

HIDDEN, INNER, HEADS, HEAD_DIM = 2048, 8192, 16, 128
# Sequences, tokens of each that pass through a layer at once, and keys that they attend to.
SETTINGS = {"decode": (4, 1, 512), "prompt": (1, 512, 512)}


@dataclass(frozen=True)
class _Pair:
    op: str
    ours: Callable[..., object]
    torchs: Callable[..., object]
    arguments: Sequence[Tensor]


def cases(dtype: torch.dtype, compile: bool) -> Iterator[timing.Case]:
    """Every op: a step of decoding, and a prompt."""
    for setting, sizes in SETTINGS.items():
        for pair in _pairs(*sizes, dtype):
            peers = {"eager": _bound(pair.torchs, pair.arguments)}
            if compile:
                peers["torch.compile"] = _bound(timing.compiled(pair.torchs), pair.arguments)
            yield timing.Case(pair.op, setting, _bound(pair.ours, pair.arguments), peers)


def _bound(function: Callable[..., object], arguments: Sequence[Tensor]) -> timing.Step:
    return lambda: function(*arguments)


def _pairs(batch: int, tokens: int, keys: int, dtype: torch.dtype) -> Iterator[_Pair]:
    """Each op beside the line of plain torch that models have in its place."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    x, r, w, b = made(batch, tokens, HIDDEN), made(batch, tokens, HIDDEN), made(HIDDEN), made(HIDDEN)
    shape = (HIDDEN,)
    yield _Pair("layer_norm", norm.layer_norm, lambda x, w, b: functional.layer_norm(x, shape, w, b), (x, w, b))
    yield _Pair(
        "pre_layer_norm",
        lambda x, r, w, b, c: norm.pre_layer_norm(x, r, w, b, input_bias=c),
        lambda x, r, w, b, c: (functional.layer_norm(total := x + r + c, shape, w, b), total),
        (x, r, w, b, w),
    )
    yield _Pair("rms_norm", norm.rms_norm, lambda x, w: functional.rms_norm(x, shape, w, 1e-6), (x, w))
    yield _Pair(
        "pre_rms_norm",
        norm.pre_rms_norm,
        lambda x, r, w: ((total := x + r), functional.rms_norm(total, shape, w, 1e-6)),
        (x, r, w),
    )
    scores, mask = made(batch, HEADS, tokens, keys), torch.zeros(batch, 1, 1, keys, dtype=dtype)
    yield _Pair(
        "softmax",
        lambda s, m: softmax.softmax(s, m, scale=0.1),
        lambda s, m: functional.softmax(s * 0.1 + m, dim=-1),
        (scores, mask),
    )
    hidden, bias = made(batch, tokens, INNER), made(INNER)
    yield _Pair(
        "bias_activation gelu_tanh",
        lambda h, b: activation.bias_activation(h, b, "gelu_tanh"),
        lambda h, b: functional.gelu(h + b, approximate="tanh"),
        (hidden, bias),
    )
    yield _Pair(
        "bias_activation relu",
        lambda h, b: activation.bias_activation(h, b, "relu"),
        lambda h, b: functional.relu(h + b),
        (hidden, bias),
    )
    yield _Pair(
        "gated_activation silu",
        lambda h: activation.gated_activation(h, None, "silu"),
        lambda h: h[..., : INNER // 2] * functional.silu(h[..., INNER // 2 :]),
        (hidden,),
    )
    query = made(batch, tokens, HEADS, HEAD_DIM).transpose(1, 2)
    angles = rotary.angles(torch.arange(tokens), HEAD_DIM)
    cos, sin = tables(*angles, dtype)
    yield _Pair("rotary", lambda q: rotary.rotary(q, *angles), lambda q: turned(q, cos, sin), (query,))
    yield _Pair(
        "residual_add_bias_",
        lambda r, x, a, b: residual.residual_add_bias_(r, x, a, b, b, scale=0.5),
        lambda r, x, a, b: r.copy_(x + a + (r + b + b) * 0.5),
        (r.clone(), x, x, b),
    )
    yield _Pair(
        "moe_res_matmul_",
        residual.moe_res_matmul_,
        lambda o, r, c: o.copy_(o * c[HIDDEN:] + r * c[:HIDDEN]),
        (x.clone(), r, torch.full((2 * HIDDEN,), 0.5, dtype=dtype)),
    )
