"""Attention over a cache of keys and values: ``ds_plugin::cached_attention``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import DTYPES, CheckError, check_written
from ds_plugin_sdk.ops._references import working


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
    all of whose scores are minus infinity, because it may attend to nothing, gives zeros. Autograd does not record it.

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
    if scale is None:
        scale = 1 / math.sqrt(max(query.shape[-1], 1))
    result: Tensor = _library.call(
        "cached_attention", query, key, value, key_cache, value_cache, past, scale, mask, alibi, window, causal
    )
    _library.mark_modified([key_cache, value_cache])
    return result


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
    shapes = {"key": [batch, key.shape[1], new, head_dim], "key_cache": [batch, key.shape[1], room, head_dim]}
    for name, tensor in (("key", key), ("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        shape = shapes[name.replace("value", "key")]
        if list(tensor.shape) != shape or tensor.dtype != query.dtype or tensor.device != query.device:
            raise CheckError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
                f"expected {query.dtype} {shape} on {query.device}"
            )
    if window < 0:
        raise CheckError(f"window is {window}; expected a number of positions, or 0")
    if alibi is not None and (list(alibi.shape) != [heads] or alibi.dtype != torch.float32):
        raise CheckError(f"alibi is {alibi.dtype} {list(alibi.shape)}; expected float32 [{heads}]")
    for name, added in (("mask", mask), ("alibi", alibi)):
        if added is not None and added.device != query.device:
            raise CheckError(f"{name} is on {added.device}; expected {query.device}, where query is")
    if mask is not None:
        _check_mask(mask, query, total)


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
    total = past + key.shape[2]
    key_cache[:, :, past:total].copy_(key)
    value_cache[:, :, past:total].copy_(value)
    dtype = working(query)
    groups = query.shape[1] // max(key_cache.shape[1], 1)
    keys, values = (
        cache[:, :, :total].to(dtype).repeat_interleave(groups, dim=1) for cache in (key_cache, value_cache)
    )
    scores = query.to(dtype) @ keys.transpose(2, 3) * scale
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


__all__ = ["cached_attention", "cached_attention_reference"]
