"""Attention over a cache of keys and values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import LONG_ROW, MANY_COLUMNS, MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops.attention import cached_attention, cached_attention_int8

# Rows, heads, heads of keys, new tokens, past ones, size of a head.
_SHAPES = (
    (1, 2, 2, 1, 0, 16),
    (2, 4, 2, 1, 7, 40),
    (1, 3, 1, 3, 70, 33),
    (2, 2, 2, 9, 0, 64),
    (1, 4, 2, 8, 5, 16),
    (1, 4, 2, 4, 510, 8),
)
# Those of more than 128 tokens, or positions, are several blocks of queries and keys.
_REAL = (
    (4, 16, 16, 1, 130, 64),
    (1, 16, 4, 40, 0, 64),
    (1, 8, 2, 1, 700, 128),
    (2, 4, 2, 150, 0, 128),
    (1, 4, 2, 100, 150, 64),
)


def _formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    past: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _appended(key_cache, key, past), _appended(value_cache, value, past)
    total = past + key.shape[2]
    ones = torch.ones((*keys.shape[:2], total, 1), dtype=query.dtype)
    held = keys[:, :, :total], values[:, :, :total], ones, ones
    return keys, values, _attention(query, held, **options)


def _int8_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    past: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (levels, steps), (value_levels, value_steps) = _quantized(key), _quantized(value)
    written = (
        _appended(key_cache.to(query.dtype), levels, past),
        _appended(value_cache.to(query.dtype), value_levels, past),
        _appended(key_scales, steps, past),
        _appended(value_scales, value_steps, past),
    )
    held = [each[:, :, : past + key.shape[2]] for each in written]
    return *written, _attention(query, held, **options)


def _appended(cache: Tensor, new: Tensor, past: int) -> Tensor:
    return torch.cat([cache[:, :, :past], new, cache[:, :, past + new.shape[2] :]], dim=2)


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """A row's numbers in steps of 1 / 127 of the largest; a row with one that is not finite has that as its step."""
    largest = rows.abs().amax(-1, keepdim=True) if rows.shape[-1] else rows.new_zeros((*rows.shape[:-1], 1))
    levels = torch.round(rows / torch.where(largest == 0, 1.0, largest / 127))
    return torch.where(largest.isfinite(), levels, 0.0), largest / 127


def _attention(
    query: Tensor,
    held: Sequence[Tensor],
    scale: float,
    mask: Tensor | None,
    alibi: Tensor | None,
    window: int,
    causal: bool,
) -> Tensor:
    """``softmax(scale q (k s)^T + ...) (v s)``; `held` are keys, values, and the steps s of both, one for a row."""
    tokens, total, group = query.shape[2], held[0].shape[2], query.shape[1] // held[0].shape[1]
    keys, values, key_steps, value_steps = (each.repeat_interleave(group, dim=1) for each in held)
    position = torch.arange(total)
    own = torch.arange(total - tokens, total).unsqueeze(1)
    scores = torch.einsum("bhtd,bhpd->bhtp", query, keys) * scale * key_steps.transpose(2, 3)
    if alibi is not None:
        scores = scores + alibi[:, None, None] * position
    allowed = torch.ones(tokens, total, dtype=torch.bool)
    if causal:
        allowed = allowed & (position <= own)
    if window:
        allowed = allowed & (position > own - window)
    if mask is not None:
        mask = (mask[:, None, None, :] if mask.dim() == 2 else mask)[..., :total]
        if mask.dtype == torch.bool:
            allowed = allowed & mask
        else:
            scores = scores + mask
    scores = scores.masked_fill(~allowed, -torch.inf)
    # A query whose scores are all minus infinity may attend to nothing.
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.where(nothing, 0.0, torch.softmax(torch.where(nothing, 0.0, scores), dim=-1))
    return torch.einsum("bhtp,bhpd->bhtd", weights * value_steps.transpose(2, 3), values)


def _sample(
    make: Make, label: str, kind: Kind, shape: tuple[int, ...], new: int | None = None, **options: Any
) -> Sample:
    batch, heads, kv_heads, tokens, past, head_dim = shape
    new = tokens if new is None else new
    arguments = {
        "query": make.normal(batch, heads, tokens, head_dim),
        "key": make.normal(batch, kv_heads, new, head_dim),
        "value": make.normal(batch, kv_heads, new, head_dim),
        "key_cache": make.normal(batch, kv_heads, past + tokens + 2, head_dim),
        "value_cache": make.normal(batch, kv_heads, past + tokens + 2, head_dim),
        "past": past,
        "scale": head_dim**-0.5,
        "mask": None,
        "alibi": None,
        "window": 0,
        "causal": True,
    }
    return Sample(label, {**arguments, **options}, kind)


def _int8(make: Make, sample: Sample) -> Sample:
    """The same call with an int8 cache. New rows have steps of a power of two, so that no number is near a tie."""
    arguments = dict(sample.arguments)
    for name in ("key", "value"):
        arguments[name] = _with_exact_step(arguments[name])
        levels = make.integers(-127, 128, *arguments[f"{name}_cache"].shape, dtype=torch.int8)
        arguments[f"{name}_cache"] = levels
        arguments[f"{name}_scales"] = make.positive(*levels.shape[:3], 1, scale=1 / 127, dtype=torch.float32)
    names = inspect.signature(cached_attention_int8).parameters
    return Sample(sample.label, {name: arguments[name] for name in names}, sample.kind)


def _with_exact_step(rows: Tensor) -> Tensor:
    largest = 127 / 64
    exact = rows.clamp(-largest, largest)
    exact[..., :1] = largest
    exact[:, 1::2] *= -1  # of every other head the largest in size is negative
    return exact


def _int8_samples(make: Make) -> Iterator[Sample]:
    for each in _samples(make):
        sample = _int8(make, each)
        yield sample
        if each.label.endswith("another scale"):
            zeros = {name: sample.arguments[name].clone() for name in ("key", "value")}
            for rows in zeros.values():
                rows[:, :, -1] = 0
            yield Sample(f"{sample.label}, a token of zeros", {**sample.arguments, **zeros}, sample.kind)


def _large(make: Make) -> Iterator[Sample]:
    yield _sample(make, f"{MANY_ROWS} rows", "adversarial", (MANY_ROWS, 1, 1, 1, 2, 4))
    for tokens in (1, 3):
        shape = (1, 2, 1, tokens, MANY_COLUMNS, 8)
        yield _sample(make, f"{tokens} tokens after {MANY_COLUMNS}", "adversarial", shape)
    yield _sample(make, "1100 tokens", "adversarial", (1, 1, 1, 1100, 0, 8))


def _one_key(make: Make) -> Iterator[Sample]:
    """One key is like the query: the result is its value, where a mean of many would hide what is lost."""
    for position in (0, LONG_ROW // 2, LONG_ROW - 1, LONG_ROW):
        sample = _sample(make, f"one key counts, at {position}", "adversarial", (1, 1, 1, 1, LONG_ROW, 8))
        keys = sample.arguments["key_cache"] if position < LONG_ROW else sample.arguments["key"]
        keys[:, :, position % LONG_ROW] = 8 * sample.arguments["query"][:, :, 0]
        yield sample


def _one_key_of_int8(make: Make) -> Iterator[Sample]:
    for position in (0, LONG_ROW // 2, LONG_ROW - 1):
        label = f"one key counts, at {position}"
        sample = _int8(make, _sample(make, label, "adversarial", (1, 1, 1, 1, LONG_ROW, 8)))
        query = sample.arguments["query"][:, :, 0].float()
        largest = query.abs().amax(-1, keepdim=True)
        sample.arguments["key_cache"][:, :, position] = (query / largest * 127).round().to(torch.int8)
        sample.arguments["key_scales"][:, :, position] = 8 * largest / 127
        yield sample


def _others(make: Make) -> Iterator[Sample]:
    """What the samples of each shape have in common is another here."""
    for tokens in (1, 3):
        shape = (2, 4, 2, tokens, 9, 16)
        sample = functools.partial(_sample, make, kind="adversarial", shape=shape)
        total = tokens + 9
        yield sample(f"{shape}, another scale", scale=0.05)
        allowed = make.integers(0, 3, 2, 1, tokens, total) > 0
        yield sample(f"{shape}, bool mask of each query", mask=allowed)
        yield sample(f"{shape}, bool mask of each head", mask=make.integers(0, 3, 1, 4, 1, total) > 0)
        yield sample(f"{shape}, mask of more positions", mask=make.normal(2, 1, tokens, total + 5))
        padded = torch.arange(total + 5) >= make.integers(1, 9, 2, 1)
        yield sample(f"{shape}, padding of more positions", mask=padded)
        yield sample(f"{shape}, no new keys", new=0)
        for label, hides in (("minus infinity", -torch.inf), ("the smallest number", torch.finfo(make.dtype).min)):
            hidden = make.normal(2, 1, tokens, total)
            hidden[0, :, -1] = hides
            yield sample(f"{shape}, a query whose mask is {label}", mask=hidden)
        allowed = allowed.clone()
        allowed[1, :, -1] = False
        yield sample(f"{shape}, a query whose bool mask hides all", mask=allowed)
        slopes = make.positive(4, scale=0.05, dtype=torch.float32)
        mask = make.normal(2, 4, tokens, total)
        yield sample(f"{shape}, mask, alibi and window", mask=mask, alibi=slopes, window=4)
        yield sample(f"{shape}, alibi and window, not causal", alibi=slopes, window=4, causal=False)
        yield sample(f"{shape}, alibi and padding", alibi=slopes, mask=torch.arange(total) >= torch.tensor([[5], [0]]))
        yield sample(f"{shape}, a head of 256", shape=(1, 2, 1, tokens, 9, 256))
        large = sample(f"{shape}, large products", scale=1e-5)
        sizes = {name: 300 * large.arguments[name] for name in ("query", "key", "key_cache")}
        yield Sample(large.label, {**large.arguments, **sizes}, large.kind)
    for label, hides in (("minus infinity", -torch.inf), ("the smallest number", torch.finfo(make.dtype).min)):
        padded = make.normal(2, 1, 9, 9)
        padded[0, :, :, :3] = hides  # all that the first queries may attend to
        yield _sample(make, f"a prompt padded by {label}", "adversarial", (2, 4, 2, 9, 0, 16), mask=padded)


def _samples(make: Make) -> Iterator[Sample]:
    sample = functools.partial(_sample, make)
    yield sample("no rows", "empty", (0, 2, 2, 1, 3, 8))
    for shape in (*_SHAPES, *_REAL):
        if shape == _REAL[0]:
            yield from _others(make)
        kind: Kind = "real" if shape in _REAL else "adversarial"
        batch, heads, _, tokens, past, _ = shape
        yield sample(f"{shape}", kind, shape)
        padded = torch.arange(past + tokens) >= make.integers(0, past + tokens, batch, 1)
        yield sample(f"{shape}, padded", kind, shape, mask=padded)
        added = make.normal(1, heads, 1, past + tokens, dtype=torch.float32)
        slopes = make.positive(heads, scale=0.05, dtype=torch.float32)
        yield sample(f"{shape}, mask and alibi", kind, shape, mask=added, alibi=slopes)
        yield sample(f"{shape}, mask", kind, shape, mask=make.normal(batch, 1, tokens, past + tokens))
        yield sample(f"{shape}, window", kind, shape, window=3)
        yield sample(f"{shape}, not causal", kind, shape, causal=False)


def _random(make: Make) -> Mapping[str, Any]:
    batch, kv_heads, head_dim = make.size(4), make.size(4, 1), make.size(260)
    heads, tokens, past = kv_heads * make.size(4, 1), make.pick(1, 1, make.size(70)), make.size(600)
    room = past + tokens + make.size(9)
    new = make.pick(tokens, tokens, 0) if past else tokens
    total = past + new
    tokens = min(tokens, total)
    mask: Tensor | None = None
    match make.pick("none", "padding", "added", "rows"):
        case "padding":
            mask = make.integers(0, 4, batch, total) > 0
        case "added":
            shape = (make.pick(1, batch), make.pick(1, heads), make.pick(1, tokens), total + make.size(3))
            mask = make.normal(*shape, dtype=make.pick(make.dtype, torch.float32))
        case "rows":
            mask = make.integers(0, 4, batch, 1, tokens, total).log().to(make.dtype)  # -inf, and numbers
            mask = mask.contiguous()
    return {
        "query": make.normal(batch, heads, tokens, head_dim),
        "key": make.normal(batch, kv_heads, min(new, tokens) if new else 0, head_dim),
        "value": make.normal(batch, kv_heads, min(new, tokens) if new else 0, head_dim),
        "key_cache": make.normal(batch, kv_heads, room, head_dim),
        "value_cache": make.normal(batch, kv_heads, room, head_dim),
        "past": past,
        "scale": make.pick(max(head_dim, 1) ** -0.5, 0.1),
        "mask": mask,
        "alibi": make.positive(heads, scale=0.05, dtype=torch.float32) if make.chance() else None,
        "window": make.pick(0, 0, 1, make.size(700)),
        "causal": make.chance(),
    }


def _random_int8(make: Make) -> Mapping[str, Any]:
    return _int8(make, Sample("", _random(make))).arguments


def _schema_arguments(arguments: Mapping[str, Any]) -> Sequence[Any]:
    return list(arguments.values())


OPS = (
    OpInfo(
        name="cached_attention",
        family="attention",
        function=cached_attention,
        formula=_formula,
        samples=_samples,
        random=_random,
        written=("key_cache", "value_cache"),
        broadcasts=("mask",),  # a static cache has one of more positions
        schema_arguments=_schema_arguments,
        large=lambda make: (*_large(make), *_one_key(make)),
        # An infinite slope times the distance 0 is NaN, as is what torch makes of a later key: its score plus -inf.
        finite=("alibi", "query", "key", "value", "key_cache", "value_cache"),
        # Means of values of size one; torch's attention for prompts rounds the weights, too.
        rtol={torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9},
        atol={torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8},
    ),
    OpInfo(
        name="cached_attention_int8",
        family="attention",
        function=cached_attention_int8,
        formula=_int8_formula,
        samples=_int8_samples,
        random=_random_int8,
        written=("key_cache", "value_cache", "key_scales", "value_scales"),
        broadcasts=("mask",),  # a static cache has one of more positions
        schema_arguments=_schema_arguments,
        large=lambda make: (*(_int8(make, sample) for sample in _large(make)), *_one_key_of_int8(make)),
        finite=("alibi", "query", "key", "value", "key_scales", "value_scales"),
        levels=True,
        # As above; keys and values that prompts attend to are rounded to the query's dtype.
        rtol={torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9},
        atol={torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8},
    ),
)
