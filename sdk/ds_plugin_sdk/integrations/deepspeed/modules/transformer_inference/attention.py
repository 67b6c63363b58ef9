"""Softmax, attention over the cached tokens, and rotary embedding."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.integrations.deepspeed.modules.transformer_inference.workspace import workspace
from ds_plugin_sdk.ops.attention import cached_attention
from ds_plugin_sdk.ops.rotary import angles, rotary
from ds_plugin_sdk.ops.softmax import softmax as attention_softmax
from ds_plugin_sdk.ops.softmax import softmax_ as attention_softmax_


def softmax(
    scores: Tensor,
    mask: Tensor,
    alibi: Tensor,
    triangular: bool,
    recompute: bool,
    local_attention: bool,
    window_size: int,
    async_op: bool,
    layer_scale: float,
    head_offset: int,
    mp_size: int,
) -> Tensor:
    """Softmax of ``layer_scale * scores + alibi + mask`` over keys, in place where `scores` is contiguous.

    Args:
        scores: ``[batch, heads, queries, keys]``.
        mask: ``[batch, keys]``, ``[batch, queries, keys]`` or four dimensions; is added.
        alibi: ``[batch * heads * mp_size, 1 or queries, keys]``, or the same without batch, for the heads of all
            ranks; is added.
        triangular: keys after the query take no part; the last query stands at the last key.
        local_attention: only the last `window_size` keys take part.
        head_offset: number of this rank's first head.

    Returns:
        scores, or a new tensor.
    """
    heads, keys = scores.shape[1], scores.shape[3]
    options = {"scale": layer_scale, "causal": triangular, "window": window_size if local_attention else 0}
    biases = None
    if alibi is not None and alibi.dim() > 1:
        rows = alibi.reshape(-1, heads * mp_size, alibi.shape[-2], keys)  # a batch of 1 serves all
        biases = rows[:, head_offset : head_offset + heads].to(scores.dtype)
    function = attention_softmax_ if scores.is_contiguous() else attention_softmax
    return function(scores, _mask_for(mask, scores.dtype), biases, **options)  # type: ignore[arg-type]  # options of three types


def softmax_context(
    qkv: Tensor,
    mask: Tensor,
    rotary_dim: int,
    rotate_half: bool,
    rotate_every_two: bool,
    heads: int,
    num_kv: int,
    norm_factor: float,
    triangular: bool,
    local_attention: bool,
    window_size: int,
    no_masking: bool,
    layer_id: int,
    num_layers: int,
    alibi: Tensor,
    rope_theta: float,
    is_prompt: bool,
    token_idx: Tensor | None,
    position_ids: Tensor | None,
) -> list[Tensor]:
    """Attention of new tokens to themselves and to those in the layer's cache, which they are appended to.

    Several tokens at once are a prompt and begin a sequence, unless `Workspace.go_on` has said that they follow
    others; a single one continues it (or begins it, where the cache is empty, or `mask` is for one position). With a
    mask for as many positions as the cache holds, or fewer, it is the last of those once more: a step that failed in a
    later layer is repeated.

    Args:
        qkv: ``[batch, tokens, (heads + 2 * kv_heads) * head_dim]``, a contiguous block each of queries, keys, values.
        mask: as in `softmax`; for all positions, or more.
        rotary_dim: how many elements of a head carry the position; none if not positive.
        rotate_half: pair element i with i + rotary_dim / 2; else with its neighbour.
        num_kv: heads of keys and values; as many as `heads` if not positive.
        norm_factor: its square is the scale of the scores.
        alibi: ``[batch * heads, 1 or tokens, positions]``; is added.
        rope_theta: base of the rotary angles.
        position_ids: ``[batch, tokens]`` for the rotary angles; counted on from the cache if None.

    Returns:
        The context ``[batch, tokens, heads * head_dim]``, and the filled parts of the layer's cache, views
        ``[batch, kv_heads, positions, head_dim]``.

    Raises:
        OpError: the sequence is longer than ``max_out_tokens``.
        InvalidTensorError: the columns of `qkv` are no heads.
    """
    batch, tokens, _ = qkv.shape
    query, key, value = _heads_of(qkv, heads, num_kv if num_kv > 0 else heads)
    added = None if no_masking else _mask_for(mask, qkv.dtype)
    layer = workspace.layer(layer_id, key, not _continues(layer_id, tokens, added))
    past, layer.length = layer.length, layer.length + tokens
    if rotary_dim > 0:
        cos, sin = _angles(position_ids, past, tokens, rotary_dim, rope_theta, qkv.device)
        query, key = (rotary(each, cos, sin, interleaved=not rotate_half) for each in (query, key))
    if alibi is not None and alibi.dim() > 1:
        added = _with_biases(added, alibi.reshape(-1, heads, *alibi.shape[-2:])[..., : layer.length].to(qkv.dtype))
    context = cached_attention(
        query,
        key,
        value,
        layer.keys[:batch],
        layer.values[:batch],
        past,
        scale=norm_factor * norm_factor,
        mask=added,
        window=window_size if local_attention else 0,
        causal=triangular,
    )
    return [context.transpose(1, 2).flatten(2), *layer.filled(batch)]


def _heads_of(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, views ``[batch, heads, tokens, head_dim]``."""
    batch, tokens, width = qkv.shape
    if width % (heads + 2 * kv_heads):
        raise InvalidTensorError(
            "qkv does not fit the heads",
            op="transformer_inference",
            why=f"it has {width} columns, for {heads} heads of queries and {kv_heads} each of keys and values",
            hint="num_kv says how many heads of keys and values there are",
        )
    head_dim = width // (heads + 2 * kv_heads)
    split = qkv.view(batch, tokens, heads + 2 * kv_heads, head_dim).transpose(1, 2)
    return split.narrow(1, 0, heads), split.narrow(1, heads, kv_heads), split.narrow(1, heads + kv_heads, kv_heads)


def _with_biases(mask: Tensor | None, biases: Tensor) -> Tensor:
    """What is added to the scores, of the positions that have biases."""
    return biases if mask is None else biases + mask[..., : biases.shape[-1]]


def _continues(layer_id: int, tokens: int, mask: Tensor | None) -> bool:
    """Whether tokens follow those in a layer's cache, which forgets what the mask of a single one has no room for."""
    layer = workspace.layers.get(layer_id)
    if layer is not None and layer.goes_on:
        layer.goes_on = False
        return True
    if layer is None or mask is None or tokens > 1:
        return tokens == 1
    before = mask.shape[-1] - 1
    layer.length = min(layer.length, before)  # the mask may be for more positions than there are
    return before > 0


def _mask_for(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask in four dimensions, of a dtype that can be added to scores of `dtype`; None if there is none."""
    if mask is None or mask.dim() == 1:
        return None
    if mask.dtype not in (dtype, torch.float32):
        mask = mask.to(dtype)
    return mask if mask.dim() == 4 else mask.reshape(mask.shape[0], 1, -1, mask.shape[-1])


def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, rotary_dim: int, offset: int, num_heads: int, rotate_half: bool, rope_theta: float
) -> list[Tensor]:
    """Rotary embedding of ``[batch, tokens, num_heads * head_dim]``, the first token at position `offset`."""
    cos, sin = _angles(None, offset, query.shape[1], rotary_dim, rope_theta, query.device)
    heads = (each.view(*each.shape[:2], num_heads, -1).transpose(1, 2) for each in (query, key))
    return [rotary(each, cos, sin, interleaved=not rotate_half).transpose(1, 2).flatten(2) for each in heads]


def _angles(
    positions: Tensor | None, first: int, tokens: int, rotary_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of given positions; else of those from `first` on, out of a table that layers and tokens share."""
    if positions is not None:
        return angles(positions, rotary_dim, theta)
    end = first + tokens
    # For all that caches have room for: made for the prompt, and not while a graph of a later step is captured.
    length = workspace.room if end <= workspace.room else 1 << (end - 1).bit_length()
    cos, sin = _table(length, rotary_dim, theta, device)
    return cos[:, first:end], sin[:, first:end]


@functools.lru_cache(maxsize=16)
def _table(length: int, rotary_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # whoever uses it next may record
        return angles(torch.arange(length, device=device), rotary_dim, theta)
