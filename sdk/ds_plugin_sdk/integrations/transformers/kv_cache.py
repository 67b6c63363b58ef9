"""Layers of transformers' cache with spare capacity: appending copies the new tokens, not all that came before."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import large_pages
from ds_plugin_sdk.ops.attention import dequantize_rows, quantize_rows

# Room for so many positions more, or for half as many again as there are.
_LEAST_SPARE = 64


class Room(NamedTuple):
    """What new keys and values are written to.

    Attributes:
        keys, values: ``[batch, kv_heads, room, head_dim]``, int8 if there are scales.
        key_scales, value_scales: float32, ``[batch, kv_heads, room, 1]``, or None.
        past: how many positions are held.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    past: int


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed where types are checked
    """Keys and values, ``[batch, kv_heads, positions, head_dim]``, at the front of larger tensors.

    It is a `DynamicLayer` to all who look at it: `keys` and `values` are what was appended.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}
        self._lengths = {"keys": 0, "values": 0}
        self.is_plain = True  # none of another class of tensors, which may mean something
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        return self._get("keys")

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._set("keys", value)

    @property
    def values(self) -> Tensor | None:
        return self._get("values")

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._set("values", value)

    def _get(self, name: str) -> Tensor | None:
        room = self._rooms.get(name)
        return None if room is None else room[:, :, : self._lengths[name]]

    def _set(self, name: str, value: Tensor | None) -> None:
        if value is None:
            self._rooms.pop(name, None)
            self._lengths[name] = 0
        else:
            self._rooms[name] = value
            self._lengths[name] = value.shape[2]
        self.is_plain = all(type(room) is Tensor for room in self._rooms.values())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self._lengths["keys"]

    def make_room(self, tokens: int) -> Room:
        """Tensors large enough for so many positions more, for a layer that is initialized. `advance` says that they
        were written.
        """
        past = self._lengths["keys"]
        if past + tokens > self._rooms["keys"].shape[2]:
            room = past + tokens + max(_LEAST_SPARE, past // 2)
            for name, states in self._rooms.items():
                batch, heads, _, head_dim = states.shape
                grown = large_pages.zeros((batch, heads, room, head_dim), states)
                if past:
                    grown[:, :, :past] = states[:, :, :past]
                self._rooms[name] = grown
        return Room(self._rooms["keys"], self._rooms["values"], None, None, past)

    def is_at(self, room: Room) -> bool:
        """Whether it has the tensors of a room still, and holds as many positions as then."""
        lengths, rooms = self._lengths, self._rooms
        return lengths["keys"] == room.past and rooms.get("keys") is room.keys and rooms.get("values") is room.values

    def advance(self, tokens: int) -> None:
        """Count positions that were written behind those held."""
        self._lengths["keys"] += tokens
        self._lengths["values"] += tokens

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_plain or type(key_states) is not Tensor or type(value_states) is not Tensor:
            appended: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return appended
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        room = self.make_room(key_states.shape[2])
        total = room.past + key_states.shape[2]
        room.keys[:, :, room.past : total] = key_states
        room.values[:, :, room.past : total] = value_states
        self.advance(key_states.shape[2])
        return room.keys[:, :, :total], room.values[:, :, :total]


class Int8Layer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed where types are checked
    """Keys and values in 8 bits with a scale for each position and head, as `quantize_rows` makes them.

    To all who look at it it is a `DynamicLayer` of the model's dtype: `keys` and `values` are made floats when they are
    asked for, and quantized when they are set. What moves, repeats, selects or removes them does so with the 8 bits,
    by transformers' own code in a layer of the numbers of steps, and in one of the scales.
    """

    def __init__(self) -> None:
        self.levels = GrowingLayer()  # [batch, kv_heads, positions, head_dim]
        self.scales = GrowingLayer()  # [batch, kv_heads, positions, 1]
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        return self._floats(self.levels.keys, self.scales.keys)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self.levels.keys, self.scales.keys = _quantized(value)

    @property
    def values(self) -> Tensor | None:
        return self._floats(self.levels.values, self.scales.values)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self.levels.values, self.scales.values = _quantized(value)

    def _floats(self, levels: Tensor | None, scales: Tensor | None) -> Tensor | None:
        return None if levels is None or scales is None else dequantize_rows(levels, scales, self.dtype)

    @property
    def is_plain(self) -> bool:
        return self.levels.is_plain and self.scales.is_plain

    @property
    def nbytes(self) -> int:
        """Bytes of the positions that are held, without room for more."""
        held = (self.levels.keys, self.levels.values, self.scales.keys, self.scales.values)
        return sum(each.nbytes for each in held if each is not None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        (keys, key_scales), (values, value_scales) = (
            quantize_rows(states[:, :, :0]) for states in (key_states, value_states)
        )
        self.levels.lazy_initialization(keys, values)
        self.scales.lazy_initialization(key_scales, value_scales)
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.levels.get_seq_length()

    def make_room(self, tokens: int) -> Room:
        """As `GrowingLayer.make_room`."""
        levels, scales = self.levels.make_room(tokens), self.scales.make_room(tokens)
        return Room(levels.keys, levels.values, scales.keys, scales.values, levels.past)

    def is_at(self, room: Room) -> bool:
        """As `GrowingLayer.is_at`."""
        levels, scales = self.levels._rooms, self.scales._rooms
        return (
            self.get_seq_length() == room.past
            and (levels.get("keys") is room.keys and levels.get("values") is room.values)
            and (scales.get("keys") is room.key_scales and scales.get("values") is room.value_scales)
        )

    def advance(self, tokens: int) -> None:
        """As `GrowingLayer.advance`."""
        self.levels.advance(tokens)
        self.scales.advance(tokens)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and give all as floats: for a model's own attention.

        Raises:
            SdkError: gradients are recorded, which rounding would cut.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise SdkError(
                "keys with gradients cannot be appended to an int8 cache",
                why="accelerate(model, cache='int8') has filled it, and rounding to 8 bits has no gradient",
                hint="call the model within torch.no_grad(), or with a new cache",
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        levels, scales = zip(quantize_rows(key_states), quantize_rows(value_states), strict=True)
        self.levels.update(*levels)
        self.scales.update(*scales)
        keys, values = self.keys, self.values
        assert keys is not None and values is not None  # it is initialized
        return keys, values

    def _in_both(self, method: str, *args: Any) -> None:
        for part in (self.levels, self.scales):
            getattr(part, method)(*args)

    def crop(self, *args: Any) -> None:
        self._in_both("crop", *args)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._in_both("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._in_both("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._in_both("batch_select_indices", indices)

    def offload(self) -> None:
        self._in_both("offload")

    def prefetch(self) -> None:
        self._in_both("prefetch")

    def reset(self) -> None:
        self._in_both("reset")
        self.is_initialized = self.levels.is_initialized


def _quantized(states: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if states is None else quantize_rows(states)


# The kinds of layers that are made here.
AppendingLayer = GrowingLayer | Int8Layer


def may_grow(cache: Cache | None) -> bool:
    """Whether layers of a cache may be asked for by `growing_layer`."""
    return cache is not None and not getattr(cache, "offloading", True) and _is_updated_as_written(cache)


def growing_layer(cache: Cache, index: int, kind: type[AppendingLayer]) -> AppendingLayer | None:
    """The layer of a cache, exchanged for one of a kind that grows if it is a plain one and still empty; None for other
    kinds than those made here.
    """
    while cache.layer_class_to_replicate is DynamicLayer and len(cache.layers) <= index:
        cache.layers.append(kind())
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if type(layer) is DynamicLayer and not layer.is_initialized and "update" not in vars(layer):
        layer = cache.layers[index] = kind()
    is_ours = type(layer) in (GrowingLayer, Int8Layer) and layer.is_plain and "update" not in vars(layer)
    return layer if is_ours else None


def _is_updated_as_written(cache: Cache) -> bool:
    """Whether `update` is transformers' own: a subclass's, or a patch, may give other keys than it is given."""
    return getattr(cache.update, "__func__", None) is _UPDATES[0] and (Cache.update, DynamicLayer.update) == _UPDATES


def _as_written(kind: type) -> Any:
    update = vars(kind)["update"]
    written = (update.__module__, update.__qualname__) == (kind.__module__, f"{kind.__qualname__}.update")
    return update if written and not hasattr(update, "__wrapped__") else None


# What a growing layer does in their place.
_UPDATES = (_as_written(Cache), _as_written(DynamicLayer))
