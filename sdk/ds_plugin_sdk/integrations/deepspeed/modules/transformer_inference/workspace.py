"""Keys and values of earlier tokens, as DeepSpeed's layers rely on this module to keep them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_plugin_sdk import registry
from ds_plugin_sdk.errors import OpError


@dataclass
class LayerCache:
    """The cache of one layer: ``[batch, kv_heads, room, head_dim]`` each, of which `length` positions are filled.

    The next tokens follow those if it `goes_on`, however many they are. `sequence` counts the sequences it has held.
    """

    keys: Tensor
    values: Tensor
    length: int = 0
    goes_on: bool = False
    sequence: int = 0

    def filled(self, batch: int) -> list[Tensor]:
        """Keys and values so far, views ``[batch, kv_heads, length, head_dim]``."""
        views = [cache[:batch, :, : self.length] for cache in (self.keys, self.values)]
        for view in views:
            view.of_sequence = self.sequence  # type: ignore[attr-defined]  # read by `Workspace.go_on`
        return views


@dataclass
class Workspace:
    """The caches of all layers; each is made when its first tokens come, for then its shape is known.

    Each layer counts its own tokens, so that models may take turns.
    """

    room: int = 1024  # DeepSpeed's default for max_out_tokens
    layers: dict[int, LayerCache] = field(default_factory=dict)

    def layer(self, number: int, key: Tensor, new_sequence: bool) -> LayerCache:
        """The cache of a layer for keys ``[batch, kv_heads, tokens, head_dim]``."""
        batch, kv_heads, tokens, head_dim = key.shape
        layer = self.layers.get(number)
        if layer is None or (new_sequence and not self._fits(layer, key)):
            shape = (batch, kv_heads, self.room, head_dim)
            with torch.inference_mode(False):  # the next prompt may come without it
                layer = self.layers[number] = LayerCache(key.new_empty(shape), key.new_empty(shape))
        if new_sequence:
            layer.length = 0
            layer.sequence += 1
        if layer.length + tokens > self.room:
            raise OpError(
                "the sequence is longer than the cache of keys and values",
                op="softmax_context",
                why=f"{layer.length} tokens are in it, {tokens} are added, and there is room for {self.room}",
                hint="deepspeed.init_inference(max_out_tokens=...)",
            )
        return layer

    def go_on(self, number: int, past: Tensor) -> None:
        """Let a layer's next tokens follow those of `past`, one of `LayerCache.filled`, or the first ones of it.

        Raises:
            OpError: that sequence is not in the cache any more.
        """
        layer = self.layers.get(number)
        if layer is None:
            return
        if getattr(past, "of_sequence", layer.sequence) != layer.sequence:
            raise OpError(
                "the keys and values handed over are not in the cache any more",
                op="softmax_context",
                why="DeepSpeed's injected layers keep those of one sequence, and another has begun since",
                hint="end one sequence before the next, or leave out replace_with_kernel_inject",
            )
        positions = past.shape[-2]
        layer.length, layer.goes_on = min(layer.length, positions), positions > 0

    def _fits(self, layer: LayerCache, key: Tensor) -> bool:
        batch, kv_heads, _, head_dim = key.shape
        cache = layer.keys
        return (
            cache.shape[0] >= batch
            and cache.shape[1:] == (kv_heads, self.room, head_dim)
            and (cache.dtype, cache.device) == (key.dtype, key.device)
        )


workspace = Workspace()


def _allocate(
    dtype: torch.dtype,
    hidden: int,
    num_heads: int,
    prompt_length: int,
    batch: int,
    num_layers: int,
    mp_size: int,
    external_cache: bool,
    max_out_tokens: int,
    min_out_tokens: int,
) -> None:
    workspace.room = max_out_tokens
    if external_cache:
        return
    token = 2 * num_layers * batch * hidden // max(mp_size, 1) * dtype.itemsize
    available = registry.get_accelerator().available_memory()
    if min_out_tokens * token > available:
        raise RuntimeError(
            f"ds-plugin-sdk: there is no room for the keys and values of {min_out_tokens} tokens (min_out_tokens): "
            f"a token of this batch takes {token} bytes, and {available} are free. Use a smaller batch."
        )


def allocate_workspace_fp32(
    hidden: int,
    num_heads: int,
    prompt_length: int,
    batch: int,
    num_layers: int,
    mp_size: int,
    external_cache: bool,
    rank: int,
    max_out_tokens: int,
    min_out_tokens: int,
) -> None:
    """Make ready for sequences of up to `max_out_tokens`; memory is taken layer by layer, at first use.

    Args:
        external_cache: the caller keeps keys and values itself.

    Raises:
        RuntimeError: not even `min_out_tokens` tokens would fit into the device's free memory.
    """
    sizes = (hidden, num_heads, prompt_length, batch, num_layers, mp_size, external_cache)
    _allocate(torch.float32, *sizes, max_out_tokens, min_out_tokens)


def allocate_workspace_bf16(
    hidden: int,
    num_heads: int,
    prompt_length: int,
    batch: int,
    num_layers: int,
    mp_size: int,
    external_cache: bool,
    rank: int,
    max_out_tokens: int,
    min_out_tokens: int,
) -> None:
    """`allocate_workspace_fp32` for elements of two bytes."""
    sizes = (hidden, num_heads, prompt_length, batch, num_layers, mp_size, external_cache)
    _allocate(torch.bfloat16, *sizes, max_out_tokens, min_out_tokens)


allocate_workspace_fp16 = allocate_workspace_bf16


def release_workspace() -> None:
    """Give the caches' memory back."""
    workspace.layers.clear()


def retake_workspace() -> bool:
    """After `release_workspace`: caches are made again when tokens come. True: there is a workspace."""
    return True


def reset_cache() -> None:
    """Forget all tokens: the next one begins a sequence."""
    for layer in workspace.layers.values():
        layer.length = 0


def repeat_kv_cache(source_batch: int, repeats: int) -> list[Tensor]:
    """Continue with each row of the batch `repeats` times, after one prompt for all of them.

    Returns:
        Keys and values of each layer in turn, ``[source_batch * repeats, kv_heads, tokens, head_dim]``, views.

    Raises:
        RuntimeError: there has been no prompt.
    """
    if not any(layer.length for layer in workspace.layers.values()):
        raise RuntimeError("ds-plugin-sdk: the cache of keys and values is empty; run the prompt before repeating it")
    views = []
    for layer in workspace.layers.values():
        shape = (source_batch * repeats, *layer.keys.shape[1:])
        for name in ("keys", "values"):
            filled = getattr(layer, name)[:source_batch, :, : layer.length].repeat_interleave(repeats, dim=0)
            with torch.inference_mode(False):
                cache = filled.new_empty(shape)
            cache[:, :, : layer.length] = filled
            setattr(layer, name, cache)
            views.append(cache[:, :, : layer.length])
    return views
