"""A layer of transformers' cache with spare capacity: appending copies the new tokens, not all that came before."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

# Room for so many positions more, or for half as many again as there are.
_LEAST_SPARE = 64


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

    def make_room(self, tokens: int) -> tuple[Tensor, Tensor, int]:
        """Tensors large enough for so many positions more, and how many they hold, for a layer that is initialized.
        `advance` says that they were written.
        """
        past = self._lengths["keys"]
        if past + tokens > self._rooms["keys"].shape[2]:
            room = past + tokens + max(_LEAST_SPARE, past // 2)
            for name, states in self._rooms.items():
                batch, heads, _, head_dim = states.shape
                grown = states.new_zeros((batch, heads, room, head_dim))
                if past:
                    grown[:, :, :past] = states[:, :, :past]
                self._rooms[name] = grown
        return self._rooms["keys"], self._rooms["values"], past

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
        keys, values, past = self.make_room(key_states.shape[2])
        total = past + key_states.shape[2]
        keys[:, :, past:total] = key_states
        values[:, :, past:total] = value_states
        self.advance(key_states.shape[2])
        return keys[:, :, :total], values[:, :, :total]


def may_grow(cache: Cache | None) -> bool:
    """Whether layers of a cache may be asked for by `growing_layer`."""
    return cache is not None and not getattr(cache, "offloading", True) and _is_updated_as_written(cache)


def growing_layer(cache: Cache, index: int) -> GrowingLayer | None:
    """The layer of a cache, exchanged for one that grows if it is a plain one and still empty; None for other kinds."""
    while cache.layer_class_to_replicate is DynamicLayer and len(cache.layers) <= index:
        cache.layers.append(GrowingLayer())
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if type(layer) is DynamicLayer and not layer.is_initialized and "update" not in vars(layer):
        layer = cache.layers[index] = GrowingLayer()
    return layer if type(layer) is GrowingLayer and layer.is_plain and "update" not in vars(layer) else None


def _is_updated_as_written(cache: Cache) -> bool:
    """Whether `update` is transformers' own: a subclass's, or a patch, may give other keys than it is given."""
    return getattr(cache.update, "__func__", None) is _UPDATES[0] and (Cache.update, DynamicLayer.update) == _UPDATES


def _as_written(kind: type) -> Any:
    update = vars(kind)["update"]
    written = (update.__module__, update.__qualname__) == (kind.__module__, f"{kind.__qualname__}.update")
    return update if written and not hasattr(update, "__wrapped__") else None


# What a growing layer does in their place.
_UPDATES = (_as_written(Cache), _as_written(DynamicLayer))
