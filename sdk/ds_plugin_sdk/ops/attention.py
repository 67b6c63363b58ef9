"""Attention over a cache of keys and values: ``ds_plugin::cached_attention``, and ``cached_attention_int8``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import DTYPES, CheckError, check_written
from ds_plugin_sdk.ops._references import apart, working


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    past: int,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    alibi: Tensor | None = None,
    window: int = 0,
    causal: bool = True,
) -> Tensor:
    """Append keys and values to a cache, and attend to all that it holds: ``softmax(scale q k^T + biases) v``.

    New token i (of `tokens`) stands at position ``past + i``. Scores and sums are in float32, rounded once. A query
    all of whose scores are minus infinity, because it may attend to nothing, gives zeros. A backward pass through it
    raises `SdkError`.

    Args:
        query: ``[batch, heads, tokens, head_dim]``: float32, bfloat16, float16 (float64: reference only).
        key, value: ``[batch, kv_heads, tokens, head_dim]``; `kv_heads` divides `heads`, and query head h uses
            ``h // (heads / kv_heads)``. May have no tokens where the cache holds them already: then the queries stand
            at the last positions before `past`.
        key_cache, value_cache: ``[batch, kv_heads, room, head_dim]``; positions from `past` on are written.
        past: how many tokens the cache holds, the same for each row of the batch: rows are padded on the left.
        scale: of the scores; ``1 / sqrt(head_dim)`` if None.
        mask: which positions may be attended to, bool, True for yes; or a floating-point tensor of the dtype of query
            or float32 that is added to the scores. ``[batch, positions]``, or anything that broadcasts to
            ``[batch, heads, tokens, positions]``; there may be more positions than the cache then holds, the first
            count.
        alibi: a slope for each head, float32, ``[heads]``: ``slope * position of the key`` is added to the scores.
        window: attend only to the last `window` positions, the query's own included; 0 for all.
        causal: attend to no position after the query's own.

    Returns:
        ``[batch, heads, tokens, head_dim]``, the dtype of query; in memory tokens come before heads, so that
        ``result.transpose(1, 2).flatten(2)`` is a view.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or the cache has no room; nothing was modified.
    """
    scale = _scale_of(query) if scale is None else scale
    result: Tensor = _library.call(
        "cached_attention", query, key, value, key_cache, value_cache, past, scale, mask, alibi, window, causal
    )
    _library.mark_modified([key_cache, value_cache])
    return result


def cached_attention_int8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    past: int,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    alibi: Tensor | None = None,
    window: int = 0,
    causal: bool = True,
) -> Tensor:
    """`cached_attention` with a cache in 8 bits, which has a scale for each token and head.

    New keys and values are quantized as `quantize_rows` does it, and all are attended to as the cache holds them, the
    new ones too: ``key_cache * key_scales`` and ``value_cache * value_scales``.

    Args:
        query, key, value, past, scale, mask, alibi, window, causal: as in `cached_attention`.
        key_cache, value_cache: int8, ``[batch, kv_heads, room, head_dim]``; positions from `past` on are written.
        key_scales, value_scales: float32, ``[batch, kv_heads, room, 1]``; the same positions are written.

    Returns:
        As `cached_attention`.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or the cache has no room; nothing was modified.
    """
    scale = _scale_of(query) if scale is None else scale
    written = (key_cache, value_cache, key_scales, value_scales)
    result: Tensor = _library.call(
        "cached_attention_int8", query, key, value, *written, past, scale, mask, alibi, window, causal
    )
    _library.mark_modified(written)
    return result


def quantize_rows(states: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or values in 8 bits, symmetric: ``step = max |x| / 127`` over a token's numbers of one head.

    No number moves by more than half a step, but for what float32 rounds on the way. Where one is NaN or infinite, the
    step is, and all of the row then stands for NaN.

    Args:
        states: ``[..., head_dim]``, of one dimension at least. A floating-point dtype is meant; integers are
            converted to float32.

    Returns:
        The numbers of steps, rounded to nearest even, int8, ``[..., head_dim]``; the steps, float32, ``[..., 1]``.

    Raises:
        IndexError: `states` has no dimension.
    """
    rows = states.detach().to(working(states))
    largest = rows.abs().amax(dim=-1, keepdim=True) if rows.shape[-1] else rows.new_zeros((*rows.shape[:-1], 1))
    # torch makes a reciprocal of ``127 / largest``, which rounds twice, where kernels round once.
    levels = (rows * (largest.new_tensor(127) / largest)).clamp(-127, 127).round()
    return torch.where(levels.isnan(), 0.0, levels).to(torch.int8), (largest / 127).to(torch.float32)


def dequantize_rows(levels: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What the numbers of steps that `quantize_rows` has made stand for.

    Args:
        levels: int8, ``[..., head_dim]``.
        scales: the steps, float32, ``[..., 1]``; others that broadcast with `levels` are multiplied too.
        dtype: of the result, a floating-point one. Integer dtypes truncate.

    Returns:
        ``levels * scales`` in `dtype`, ``[..., head_dim]``; computed in float32, in float64 for float64, and rounded
        once.

    Raises:
        RuntimeError: the shapes do not broadcast (torch's error).
    """
    exact = torch.promote_types(dtype, torch.float32)
    return (levels.to(exact) * scales.to(exact)).to(dtype)


def _scale_of(query: Tensor) -> float:
    return 1 / math.sqrt(max(query.shape[-1], 1))


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    past: int,
    mask: Tensor | None,
    alibi: Tensor | None,
    window: int,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    if query.dtype not in DTYPES:
        raise CheckError(f"query is {query.dtype}; expected float32, bfloat16 or float16")
    if query.dim() != 4:
        raise CheckError(f"query is {list(query.shape)}; expected [batch, heads, tokens, head_dim]")
    batch, heads, tokens, head_dim = query.shape
    if key.dim() != 4 or key.shape[1] == 0 or heads % key.shape[1]:
        raise CheckError(
            f"key is {list(key.shape)}; expected [batch, kv_heads, tokens, head_dim], a divisor of {heads} heads"
        )
    new, room = key.shape[2], key_cache.shape[2] if key_cache.dim() == 4 else 0
    total = past + new
    if past < 0 or total > room or tokens > total or new not in (0, tokens):
        raise CheckError(
            f"past is {past}, with {tokens} queries and {new} keys; expected as many keys or none, and at most {room} "
            "positions, the room of key_cache"
        )
    kv_heads = key.shape[1]
    cached = query.dtype if key_scales is None else torch.int8
    for names, tensors, dtype, shape in (
        (("key", "value"), (key, value), query.dtype, [batch, kv_heads, new, head_dim]),
        (("key_cache", "value_cache"), (key_cache, value_cache), cached, [batch, kv_heads, room, head_dim]),
        (("key_scales", "value_scales"), (key_scales, value_scales), torch.float32, [batch, kv_heads, room, 1]),
    ):
        for name, tensor in zip(names, tensors, strict=True):
            if tensor is not None:
                _check_states(name, tensor, dtype, shape, query.device)
    if window < 0:
        raise CheckError(f"window is {window}; expected a number of positions, or 0")
    if alibi is not None and (list(alibi.shape) != [heads] or alibi.dtype != torch.float32):
        raise CheckError(f"alibi is {alibi.dtype} {list(alibi.shape)}; expected float32 [{heads}]")
    for name, added in (("mask", mask), ("alibi", alibi)):
        if added is not None and added.device != query.device:
            raise CheckError(f"{name} is on {added.device}; expected {query.device}, where query is")
    if mask is not None:
        _check_mask(mask, query, total)


def _check_states(name: str, tensor: Tensor, dtype: torch.dtype, shape: list[int], device: torch.device) -> None:
    if list(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise CheckError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; expected {dtype} {shape} on {device}"
        )


def _check_mask(mask: Tensor, query: Tensor, total: int) -> None:
    batch, heads, tokens, _ = query.shape
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise CheckError(f"mask is {mask.dtype}; expected bool, float32 or {query.dtype}")
    full = (batch, heads, tokens) if mask.dim() == 4 else (batch,)
    fits = all(size in (1, wanted) for size, wanted in zip(mask.shape, full, strict=False))
    if mask.dim() not in (2, 4) or not fits or mask.shape[-1] < total:
        raise CheckError(
            f"mask is {list(mask.shape)}; expected [{batch}, {total}] or what broadcasts to "
            f"[{batch}, {heads}, {tokens}, {total}], or more positions"
        )


def _new_output(query: Tensor) -> Tensor:
    batch, heads, tokens, head_dim = query.shape
    return query.new_empty((batch, tokens, heads, head_dim)).transpose(1, 2)


@_library.op(
    "cached_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, int past, "
    "float scale, Tensor? mask, Tensor? alibi, int window, bool causal) -> Tensor",
    check=_check,
    outputs=_new_output,
)
def cached_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    past: int,
    scale: float,
    mask: Tensor | None,
    alibi: Tensor | None,
    window: int,
    causal: bool,
) -> Tensor:
    """``ds_plugin::cached_attention`` in plain torch, on any device; arguments as in `cached_attention`."""
    check_written("key_cache", key_cache)
    check_written("value_cache", value_cache)
    query, key, value = (apart(each, key_cache, value_cache) for each in (query, key, value))
    mask, alibi = (apart(each, key_cache, value_cache) for each in (mask, alibi))
    total = past + key.shape[2]
    key_cache[:, :, past:total].copy_(key)
    value_cache[:, :, past:total].copy_(value)
    return _attend(query, key_cache[:, :, :total], value_cache[:, :, :total], None, scale, mask, alibi, window, causal)


@_library.op(
    "cached_attention_int8(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor(c!) key_scales, Tensor(d!) value_scales, int past, float scale, Tensor? mask, Tensor? alibi, int window, "
    "bool causal) -> Tensor",
    check=_check,
    outputs=_new_output,
)
def cached_attention_int8_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    past: int,
    scale: float,
    mask: Tensor | None,
    alibi: Tensor | None,
    window: int,
    causal: bool,
) -> Tensor:
    """``ds_plugin::cached_attention_int8`` in plain torch, on any device; arguments as in `cached_attention_int8`."""
    written = key_cache, value_cache, key_scales, value_scales
    query, key, value = (apart(each, *written) for each in (query, key, value))
    mask, alibi = (apart(each, *written) for each in (mask, alibi))
    caches = {"key": (key, key_cache, key_scales), "value": (value, value_cache, value_scales)}
    for name, (_, cache, scales) in caches.items():
        check_written(f"{name}_cache", cache)
        check_written(f"{name}_scales", scales)
    total = past + key.shape[2]
    for new, cache, scales in caches.values():
        levels, steps = quantize_rows(new)
        cache[:, :, past:total].copy_(levels)
        scales[:, :, past:total].copy_(steps)
    steps_of_both = key_scales[:, :, :total], value_scales[:, :, :total]
    return _attend(
        query, key_cache[:, :, :total], value_cache[:, :, :total], steps_of_both, scale, mask, alibi, window, causal
    )


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    steps: tuple[Tensor, Tensor] | None,
    scale: float,
    mask: Tensor | None,
    alibi: Tensor | None,
    window: int,
    causal: bool,
) -> Tensor:
    """Attention to all `keys` and `values`, ``[batch, kv_heads, positions, head_dim]``, times their `steps` if any."""
    dtype, total = working(query), keys.shape[2]
    groups = query.shape[1] // max(keys.shape[1], 1)
    keys, values = (states.to(dtype).repeat_interleave(groups, dim=1) for states in (keys, values))
    scores = query.to(dtype) @ keys.transpose(2, 3) * scale
    if steps is not None:
        key_steps, value_steps = (each.to(dtype).repeat_interleave(groups, dim=1).transpose(2, 3) for each in steps)
        scores = scores * key_steps
    allowed = _allowed(query.shape[2], total, window, causal, query.device)
    if alibi is not None:
        scores = scores + alibi.to(dtype)[:, None, None] * torch.arange(total, device=query.device, dtype=dtype)
    if mask is not None:
        mask = (mask[:, None, None, :] if mask.dim() == 2 else mask)[..., :total]
        if mask.dtype == torch.bool:
            allowed = allowed & mask
        else:
            scores = scores + mask.to(dtype)
    scores = scores.masked_fill(~allowed, -torch.inf)
    # Where every score is -inf there is nothing to attend to.
    top = scores.amax(dim=-1, keepdim=True) if total else scores.new_zeros((*scores.shape[:3], 1))
    weights = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
    sums = weights.sum(dim=-1, keepdim=True)
    if steps is not None:
        weights = weights * value_steps
    result = weights @ values / torch.where(sums == 0, 1.0, sums)
    output = _new_output(query)
    output.copy_(result)
    return output


def _allowed(tokens: int, total: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """``[tokens, total]``: which positions the rules of position let a query attend to."""
    keys = torch.arange(total, device=device)
    queries = torch.arange(total - tokens, total, device=device).unsqueeze(1)
    allowed = torch.ones((tokens, total), dtype=torch.bool, device=device)
    if causal:
        allowed &= keys <= queries
    if window:
        allowed &= keys > queries - window
    return allowed


__all__ = [
    "cached_attention",
    "cached_attention_int8",
    "cached_attention_int8_reference",
    "cached_attention_reference",
    "dequantize_rows",
    "quantize_rows",
]
