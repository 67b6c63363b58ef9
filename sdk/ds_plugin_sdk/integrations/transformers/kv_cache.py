"""Layers of transformers' cache with spare capacity: appending copies the new tokens, not all that came before."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ds_plugin_sdk import large_pages
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.ops.attention import dequantize_rows, quantize_rows

# Room for so many positions more, or for half as many again as there are.
_LEAST_SPARE = 64


# What new keys and values are written to: keys and values, ``[batch, kv_heads, room, head_dim]``, and if they are int8
# their scales, float32, ``[batch, kv_heads, room, 1]``.
Room = tuple[Tensor, ...]


class _Appending(DynamicLayer):  # type: ignore[misc]  # transformers is not typed where types are checked
    """How the layers below are copied whole."""

    _NONE_MADE: Room | None = None

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickled, it is transformers' own layer, of floats, which can be read where this package is not installed."""
        return _transformers_own(self).__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Appending:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy({**self.__dict__, "_made": self._NONE_MADE}, memo))
        return copied


class GrowingLayer(_Appending):
    """Keys and values, ``[batch, kv_heads, positions, head_dim]``, in larger tensors.

    It is a `DynamicLayer` to all who look at it: `keys` and `values` are what was appended. They are views of the
    larger tensors: not contiguous where there is more than one head.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._rooms: dict[str, Tensor] = {}
        self._starts = {"keys": 0, "values": 0}
        self._lengths = {"keys": 0, "values": 0}
        self._made: Room | None = None  # as long as nobody has changed it
        self._left = 0  # positions that can still be written to it
        self.kind: tuple[int, torch.dtype, torch.device] | None = None  # batch, dtype and device of keys and values
        self.is_plain = True  # none of another class of tensors, which may mean something, or with gradients
        self._of_inference = False  # made in inference mode, outside of which torch lets nobody write to them
        super().__init__(*args, **kwargs)

    @property
    def keys(self) -> Tensor | None:
        return self.get("keys")

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._set("keys", value)

    @property
    def values(self) -> Tensor | None:
        return self.get("values")

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._set("values", value)

    def get(self, name: str) -> Tensor | None:
        """Keys or values as they lie in their room."""
        room = self._rooms.get(name)
        return None if room is None else room.narrow(2, self._starts[name], self._lengths[name])

    def _set(self, name: str, value: Tensor | None) -> None:
        self._made = None
        self._starts[name] = 0
        if value is None:
            self._rooms.pop(name, None)
            self._lengths[name] = 0
        else:
            self._rooms[name] = value
            self._lengths[name] = value.shape[2]
        kinds = {(room.shape[0], room.dtype, room.device) for room in self._rooms.values()}
        self.kind = kinds.pop() if len(kinds) == 1 else None
        self.is_plain = all(type(room) is Tensor and not room.requires_grad for room in self._rooms.values())
        self._of_inference = any(room.is_inference() for room in self._rooms.values())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def __copy__(self) -> GrowingLayer:
        """The same positions without room behind them: both may go on."""
        copied = type(self).__new__(type(self))
        rooms = {name: self.get(name) for name in self._rooms}
        starts = dict.fromkeys(self._starts, 0)
        copied.__dict__.update(self.__dict__, _rooms=rooms, _starts=starts, _lengths={**self._lengths}, _made=None)
        return copied

    def get_seq_length(self) -> int:
        return self._lengths["keys"]

    @property
    def held(self) -> int:
        """The number of positions that are attended to."""
        return self._lengths["keys"]

    @property
    def grows(self) -> bool:
        """Whether `make_room` and `advance` do what `update` would."""
        return self.is_plain and (not self._of_inference or torch.is_inference_mode_enabled())

    def takes(self, states: Tensor) -> bool:
        """Whether keys and values like `states`, ``[batch, ...]``, can be written without a cast. If not, `update` does
        what transformers' layer does: it promotes dtypes, or raises an error.
        """
        return not self._rooms or self.kind == (states.shape[0], states.dtype, states.device)

    def make_room(self, tokens: int) -> Room:
        """Tensors with room for so many positions behind those held, for a layer that is initialized: the same ones as
        long as there is. `advance` says that they were written.
        """
        if self._made is None or self._left < tokens:
            self._made = self._room_for(tokens)
        return self._made

    def _room_for(self, tokens: int) -> Room:
        past = self.held
        spare = max(_LEAST_SPARE, past // 2)
        places = {(self._starts[name], states.shape[2]) for name, states in self._rooms.items()}
        # Somebody may have exchanged keys or values alone; a long prompt leaves most of a room behind a window.
        fits = len(places) == 1 and all(start <= spare and start + past + tokens <= size for start, size in places)
        if not fits:
            for name, states in self._rooms.items():
                batch, heads, _, head_dim = states.shape
                grown = large_pages.zeros((batch, heads, past + tokens + spare, head_dim), states)
                if past:
                    grown[:, :, :past] = states.narrow(2, self._starts[name], past)
                self._rooms[name], self._starts[name] = grown, 0
            self._of_inference = torch.is_inference_mode_enabled()
        room = self._behind("keys"), self._behind("values")
        self._left = room[0].shape[2] - past
        return room

    def _behind(self, name: str) -> Tensor:
        """From the first position that is held on."""
        room, start = self._rooms[name], self._starts[name]
        return room if start == 0 else room[:, :, start:]

    def advance(self, tokens: int) -> None:
        """Count positions that were written behind those held."""
        self._left -= tokens
        for name in self._lengths:
            self._lengths[name] += tokens

    def _appends_in_place(self, **states: Tensor) -> bool:
        """Whether writing gives what concatenating would: no gradients are recorded, tensors that torch lets one write
        to here, and as many positions of each, of the shape of those that are held.
        """
        return (
            self.grows
            and not torch.is_grad_enabled()  # a graph may hold what an earlier call has returned
            and len({each.shape[2] for each in states.values()}) == 1
            and all(
                type(each) is Tensor
                and not each.requires_grad
                and self.takes(each)
                and (name not in self._rooms or _one_position(each) == _one_position(self._rooms[name]))
                for name, each in states.items()
            )
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # A patch of transformers' layers may come when this one is already filled.
        if _layers_update_as_written():
            return self.append(key_states, value_states, *args, **kwargs)
        patched: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return patched

    def append(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """`update` as it is written here and in transformers."""
        if not self._appends_in_place(keys=key_states, values=value_states):
            appended: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return appended
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.make_room(key_states.shape[2])
        past, total = self.held, self.held + key_states.shape[2]
        keys[:, :, past:total] = key_states
        values[:, :, past:total] = value_states
        self.advance(key_states.shape[2])
        return keys[:, :, :total], values[:, :, :total]


class GrowingSlidingLayer(GrowingLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]  # as GrowingLayer
    """The same for layers that attend to a window alone, and hold one position less than that.

    Those that have left the window stay in front of those held until there is no room left behind them.
    """

    _sliding_window_tensor: Tensor

    @property
    def grows(self) -> bool:
        # Layers that record what has left the window, for assisted generation, hold more than they attend to.
        return super().grows and not getattr(self, "record_past", False)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def get_seq_length(self) -> int:
        return int(self.cumulative_length)

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        self.cumulative_length += tokens
        left = self.held - self.sliding_window + 1
        if left > 0:
            self._made = None  # that which comes next begins later
            for name in self._lengths:
                self._starts[name] += left
                self._lengths[name] -= left


class Int8Layer(_Appending):
    """Keys and values in 8 bits with a scale for each position and head, as `quantize_rows` makes them.

    To all who look at it it is a `DynamicLayer` of the model's dtype: `keys` and `values` are made floats when they are
    asked for, and quantized when they are set. What moves, repeats, selects or removes them does so with the 8 bits,
    by transformers' own code in a layer of the numbers of steps, and in one of the scales.
    """

    _NONE_MADE = ()

    def __init__(self) -> None:
        self.levels = GrowingLayer()  # [batch, kv_heads, positions, head_dim]
        self.scales = GrowingLayer()  # [batch, kv_heads, positions, 1]
        self._made: Room = ()
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        return self._floats("keys")

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._made = ()
        self.levels.keys, self.scales.keys = _quantized(value)

    @property
    def values(self) -> Tensor | None:
        return self._floats("values")

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._made = ()
        self.levels.values, self.scales.values = _quantized(value)

    def _floats(self, name: str) -> Tensor | None:
        levels, scales = self.levels.get(name), self.scales.get(name)
        return None if levels is None or scales is None else dequantize_rows(levels, scales, self.dtype)

    @property
    def grows(self) -> bool:
        return self.levels.grows and self.scales.grows

    def takes(self, states: Tensor) -> bool:
        """As `GrowingLayer.takes`; the op reads 8 bits for queries of any dtype."""
        kind = self.levels.kind
        return kind is None or (kind[0] == states.shape[0] and kind[2] == states.device)

    def __copy__(self) -> Int8Layer:
        """As `GrowingLayer.__copy__`."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__, levels=copy.copy(self.levels), scales=copy.copy(self.scales), _made=())
        return copied

    @property
    def nbytes(self) -> int:
        """Bytes of the positions that are held, without room for more."""
        held = [part.get(name) for part in (self.levels, self.scales) for name in ("keys", "values")]
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

    @property
    def held(self) -> int:
        return self.levels.held

    def make_room(self, tokens: int) -> Room:
        """As `GrowingLayer.make_room`."""
        made = *self.levels.make_room(tokens), *self.scales.make_room(tokens)
        if len(self._made) != len(made) or not all(map(operator.is_, made, self._made)):
            self._made = made
        return self._made

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
        self.dtype = torch.promote_types(self.dtype, key_states.dtype)  # as concatenating does
        levels, scales = zip(quantize_rows(key_states), quantize_rows(value_states), strict=True)
        self.levels.append(*levels)
        self.scales.append(*scales)
        keys, values = self.keys, self.values
        assert keys is not None and values is not None  # it is initialized
        return keys, values

    def _in_both(self, method: str, *args: Any) -> None:
        self._made = ()
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


def _one_position(states: Tensor) -> tuple[int, ...]:
    return (*states.shape[:2], *states.shape[3:])


def _quantized(states: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if states is None else quantize_rows(states)


# The kinds of layers that are made here.
AppendingLayer = GrowingLayer | Int8Layer  # and what derives from them
_KINDS = (GrowingLayer, GrowingSlidingLayer, Int8Layer)

# Attributes that these have and transformers' own do not.
_OURS = (vars(GrowingLayer()).keys() | vars(Int8Layer()).keys()) - vars(DynamicLayer()).keys()


def _transformers_own(layer: AppendingLayer) -> DynamicLayer:
    kind = DynamicSlidingWindowLayer if isinstance(layer, GrowingSlidingLayer) else DynamicLayer
    own = kind.__new__(kind)
    vars(own).update({name: value for name, value in vars(layer).items() if name not in _OURS})
    for name in ("keys", "values"):
        states = getattr(layer, name)
        # A pickle holds all of a view's memory.
        setattr(own, name, None if states is None else states.clone(memory_format=torch.contiguous_format))
    return own


def may_grow(cache: Cache | None) -> bool:
    """Whether layers of a cache may be asked for by `growing_layer`."""
    return cache is not None and not getattr(cache, "offloading", True) and _is_updated_as_written(cache)


def growing_layer(cache: Cache, index: int, kind: type[AppendingLayer]) -> AppendingLayer | None:
    """The layer of a cache, exchanged for one of a kind that grows if it is a plain one and still empty, and for one of
    floats if it has a window; None for other kinds than those made here.
    """
    while cache.layer_class_to_replicate is DynamicLayer and len(cache.layers) <= index:
        cache.layers.append(kind())
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if type(layer) in _EXCHANGED and not layer.is_initialized and "update" not in vars(layer):
        layer = cache.layers[index] = _exchanged(layer, kind)
    return layer if _appends(layer) else None


def _appends(layer: Any) -> bool:
    """Whether a layer of a cache, or None, is one that is made here, and does what such a one does."""
    return type(layer) in _KINDS and layer.grows and "update" not in vars(layer)


def alike(cache: Cache, indexes: Iterable[int], states: Tensor) -> list[AppendingLayer]:
    """Layers of a cache that one call appends a position of `states` to: the first ones, as many as are initialized and
    take them, and have the same number of bits; none if one of them comes twice.
    """
    found: list[AppendingLayer] = []
    layers = cache.layers
    for index in indexes:
        layer: Any = layers[index] if index < len(layers) else None
        if not _appends(layer) or not layer.is_initialized or not layer.takes(states):
            break
        if found and (type(layer) is Int8Layer) != (type(found[0]) is Int8Layer):
            break
        found.append(layer)
    return found if len(found) == len(set(map(id, found))) else []


_EXCHANGED = (DynamicLayer, DynamicSlidingWindowLayer)


def _exchanged(layer: Any, kind: type[AppendingLayer]) -> Any:
    if type(layer) is DynamicLayer:
        return kind()
    if layer.sliding_window < 2:  # transformers' own layer holds all then
        return layer
    grown = GrowingSlidingLayer(sliding_window=layer.sliding_window)
    if getattr(layer, "record_past", False):
        grown.activate_past_recording()
    return grown


def _is_updated_as_written(cache: Cache) -> bool:
    """Whether `update` is transformers' own: a subclass's, or a patch, may give other keys than it is given."""
    own = Cache.update is _UPDATES[0] and getattr(cache.update, "__func__", None) is _UPDATES[0]
    return own and _layers_update_as_written()


def _layers_update_as_written() -> bool:
    return tuple(kind.update for kind in _EXCHANGED) == _UPDATES[1:]


def _as_written(kind: type) -> Any:
    update = vars(kind)["update"]
    written = (update.__module__, update.__qualname__) == (kind.__module__, f"{kind.__qualname__}.update")
    return update if written and not hasattr(update, "__wrapped__") else None


# What a growing layer does in their place.
_UPDATES = tuple(map(_as_written, (Cache, *_EXCHANGED)))
