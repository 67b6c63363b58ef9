"""Ops of inference: on activations and heads, attention, quantizers, tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own convention
from torch import Tensor

from gpu_check import cases, deepspeed_cuda_ops
from gpu_check.cases import Call, Case


def op_cases(*shapes: tuple[int, int]) -> Iterator[Case]:
    """Ops of inference and training, on tokens of a layer."""
    from ds_plugin_sdk.ops import activation, norm

    half = torch.bfloat16
    for tokens, hidden in shapes:
        shape, weight, bias = (tokens, hidden), cases.random(hidden, dtype=half), cases.random(hidden, dtype=half)
        size = tokens * hidden * 2
        yield cases.case_of(
            f"layer_norm {list(shape)}",
            [shape],
            2 * size,
            {
                "ds_plugin": lambda x, w=weight, b=bias: norm.layer_norm(x, w, b),
                "torch eager": lambda x, w=weight, b=bias: F.layer_norm(x, (x.shape[-1],), w, b),
                "torch compiled": torch.compile(lambda x, w=weight, b=bias: F.layer_norm(x, (x.shape[-1],), w, b)),
                **cases.liger(
                    "layer_norm", "LigerLayerNormFunction", lambda f, w=weight, b=bias: lambda x: f.apply(x, w, b, 1e-5)
                ),
            },
        )
        yield cases.case_of(
            f"rms_norm {list(shape)}",
            [shape],
            2 * size,
            {
                "ds_plugin": lambda x, w=weight: norm.rms_norm(x, w),
                "torch eager": lambda x, w=weight: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
                "torch compiled": torch.compile(lambda x, w=weight: F.rms_norm(x, (x.shape[-1],), w, 1e-6)),
                **cases.liger("rms_norm", "LigerRMSNormFunction", lambda f, w=weight: lambda x: f.apply(x, w, 1e-6)),
            },
        )
        yield cases.case_of(
            f"bias_gelu {list(shape)}",
            [shape],
            2 * size,
            {
                "ds_plugin": lambda x, b=bias: activation.bias_activation(x, b, "gelu_tanh"),
                "torch eager": lambda x, b=bias: F.gelu(x + b, approximate="tanh"),
                "torch compiled": torch.compile(lambda x, b=bias: F.gelu(x + b, approximate="tanh")),
            },
        )


def head_cases() -> Iterator[Case]:
    """Ops on the heads of an attention: LLaMA's rotary embedding, and softmax of scores."""
    from ds_plugin_sdk.ops import rotary, softmax

    tokens, head_dim = 4096, 128
    cos, sin = (table.to(cases.DEVICE) for table in rotary.angles(torch.arange(tokens), head_dim))
    heads_shape = (1, 32, tokens, head_dim)

    def turned(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    yield cases.case_of(
        f"rotary {list(heads_shape)}",
        [heads_shape],
        2 * 2 * math.prod(heads_shape),
        {
            "ds_plugin": lambda x: rotary.rotary(x, cos, sin),
            "torch eager": turned,
            "torch compiled": torch.compile(turned),
        },
    )
    for batch, heads, length in ((8, 16, 2048), (32, 32, 128)):
        shape = (batch, heads, length, length)
        yield cases.case_of(
            f"softmax {list(shape)}",
            [shape],
            4 * batch * heads * length * length,
            {
                "ds_plugin": lambda x: softmax.softmax(x, scale=0.125),
                "torch eager": lambda x: torch.softmax(x * 0.125, -1),
                "torch compiled": torch.compile(lambda x: torch.softmax(x * 0.125, -1)),
            },
        )


def token_cases(own: Path | None) -> Iterator[Case]:
    """Half of the tokens of a batch, there and back, beside DeepSpeed's own op."""
    from ds_plugin_sdk.ops import random_ltd

    batch, tokens, hidden = 8, 2048, 4096
    everything, part = (batch, tokens, hidden), (batch, tokens // 2, hidden)
    rows = torch.arange(batch, device=cases.DEVICE)[:, None]
    indices = torch.rand(batch, tokens, device=cases.DEVICE).argsort(-1)[:, : tokens // 2].sort(-1).values
    small, moved = indices.int(), 2 * 2 * math.prod(part)

    def put(x: Tensor, chosen: Tensor) -> None:
        x[rows, indices] = chosen

    gathers: dict[str, Callable[..., Any]] = {
        "ds_plugin": lambda x: random_ltd.token_gather(x, small),
        "torch eager": lambda x: x[rows, indices],
        "torch compiled": torch.compile(lambda x: x[rows, indices]),
    }
    scatters: dict[str, Callable[..., Any]] = {
        "ds_plugin": lambda x, chosen: random_ltd.token_scatter_(x, chosen, small),
        "torch eager": put,
    }
    module = own and deepspeed_cuda_ops.load("random_ltd", own)
    if module:
        gathers["DeepSpeed's own"] = lambda x: module.token_gather(x, small, True)
        scatters["DeepSpeed's own"] = lambda x, chosen: module.token_scatter_(x, chosen, small, True)
    yield cases.case_of(f"token_gather {list(everything)}, half", [everything], moved, gathers)
    yield cases.case_of(f"token_scatter_ {list(everything)}, half", [everything, part], moved, scatters)


def quantizer_cases(own: Path | None) -> Iterator[Case]:
    """Groups of 2,048 float16 values to 8 bits, beside DeepSpeed's own op."""
    from ds_plugin_sdk.ops import quantizer

    shape, groups = (8192, 4096), 16384
    size = 8192 * 4096 * 2

    def formula(x: Tensor) -> tuple[Tensor, Tensor]:
        values = x.view(groups, -1).float()
        scale = 128 / values.abs().amax(1, keepdim=True)
        return (values * scale).round().clamp(-128, 127).to(torch.int8), 1 / scale

    calls: dict[str, Callable[..., Any]] = {
        "ds_plugin": lambda x: quantizer.quantize(x, groups=groups),
        "torch eager": formula,
        "torch compiled": torch.compile(formula),
    }
    module = own and deepspeed_cuda_ops.load("quantizer", own)
    if module:
        calls["DeepSpeed"] = lambda x: module.quantize(x, groups, 8, module.Symmetric)
    yield cases.case_of(f"quantize {list(shape)}", [shape], size + size // 2, calls, dtype=torch.float16)


def prompt_cases() -> Iterator[Case]:
    """Attention of prompts of several lengths, padded on the left."""
    from ds_plugin_sdk.ops import attention

    batch, heads, tokens, head_dim = 4, 32, 2048, 128
    shape = (batch, heads, tokens, head_dim)
    q, k, v, keys, values = (cases.random(*shape, dtype=torch.bfloat16) for _ in range(5))
    first = torch.arange(batch, device=cases.DEVICE).unsqueeze(1) * 100
    mask = torch.arange(tokens, device=cases.DEVICE) >= first
    allowed = mask[:, None, None] & torch.ones(tokens, tokens, dtype=torch.bool, device=cases.DEVICE).tril()
    yield Case(
        f"padded prompt {list(shape)}",
        0,
        {
            "ds_plugin": [lambda: attention.cached_attention(q, k, v, keys, values, 0, mask=mask)],
            "torch SDPA, nothing appended": [lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)],
        },
    )


def decode_cases() -> Iterator[Case]:
    """One token after 4,095 others: attention, to an int8 cache too, and a linear layer with int8 and int4 weights.
    LLaMA's shapes.
    """
    from ds_plugin_sdk.ops import attention, linear

    past, head_dim = 4095, 128
    for batch, heads, kv_heads in ((1, 32, 32), (8, 32, 8), (16, 64, 8)):
        cache = (batch, kv_heads, past + 1, head_dim)
        new = (batch, kv_heads, 1, head_dim)
        yield cases.case_of(
            f"decode attention {list(cache)}, {heads} heads",
            [(batch, heads, 1, head_dim), new, cache, cache],
            2 * 2 * math.prod(cache),
            {
                "ds_plugin": lambda q, k, key, value: attention.cached_attention(q, k, k, key, value, past),
                "torch SDPA, nothing appended": lambda q, k, key, value: F.scaled_dot_product_attention(
                    q, key, value, enable_gqa=True
                ),
            },
        )
        yield _int8_cache_case(cache, (batch, heads, 1, head_dim), new, past)
    rows, columns = 11008, 4096
    quantized: tuple[tuple[int, Literal[4, 8]], ...] = (
        (1, 8),
        (4, 8),
        (8, 8),
        (16, 8),
        (64, 8),
        (1, 4),
        (4, 4),
        (16, 4),
    )
    for inputs, bits in quantized:
        floats = [cases.random(rows, columns, dtype=torch.bfloat16) for _ in range(8)]
        weights = [linear.quantize_weight(matrix, bits=bits) for matrix in floats]
        x = cases.random(inputs, columns, dtype=torch.bfloat16)
        yield Case(
            f"linear int{bits} [{inputs}, {columns}] x [{rows}]",
            rows * columns * bits // 8,
            {
                f"ds_plugin int{bits}": [lambda x=x, w=w: linear.linear(x, w[0], scales=w[1]) for w in weights],
                "ds_plugin bfloat16": [lambda x=x, w=w: linear.linear(x, w) for w in floats],  # above 4 inputs torch's
                "torch bfloat16": [lambda x=x, w=w: F.linear(x, w) for w in floats],
            },
        )


def _int8_cache_case(cache: tuple[int, ...], query: tuple[int, ...], new: tuple[int, ...], past: int) -> Case:
    from ds_plugin_sdk.ops import attention

    moved = 2 * math.prod(cache) + 2 * 4 * math.prod(cache[:3])
    ours: list[Call] = []
    theirs: list[Call] = []
    for _ in range(cases.sets_of_arguments(moved)):
        q, k, key, value = (cases.random(*shape, dtype=torch.bfloat16) for shape in (query, new, cache, cache))
        (keys, key_scales), (values, value_scales) = attention.quantize_rows(key), attention.quantize_rows(value)
        written = keys, values, key_scales, value_scales
        ours.append(functools.partial(attention.cached_attention_int8, q, k, k, *written, past))
        theirs.append(functools.partial(F.scaled_dot_product_attention, q, key, value, enable_gqa=True))
    name = f"decode attention to int8 {list(cache)}, {query[1]} heads"
    return Case(name, moved, {"ds_plugin": ours, "torch SDPA of bfloat16, nothing appended": theirs})
