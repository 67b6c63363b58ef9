"""What the forward of a module is while its model is accelerated: a call of ops, or of the module's own code.

Whether an op may serve is asked at each call, for models are changed after they were accelerated: adapters are added,
hooks registered, weights trained, loaded and moved.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import threading
import types
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_plugin_sdk.integrations.transformers import decoder
from ds_plugin_sdk.integrations.transformers.attention import (
    ATTENTION,
    IGNORED_ARGUMENTS,
    attention_forward,
    has_own_sdpa,
    mask_fits,
)
from ds_plugin_sdk.integrations.transformers.decoder import Decoder, Ops, ops_for
from ds_plugin_sdk.integrations.transformers.kv_cache import AppendingLayer, Int8Layer, Room, growing_layer, may_grow
from ds_plugin_sdk.integrations.transformers.replacement import Replacement
from ds_plugin_sdk.integrations.transformers.training import linear_in_training
from ds_plugin_sdk.integrations.transformers.training_layers import is_rms, norm_in_training
from ds_plugin_sdk.integrations.transformers.understood import Norm, Snapshot, Watch, is_plain_inference, version_of
from ds_plugin_sdk.integrations.transformers.weights import Matrix

# What a decoder layer does with these is known; others may be given if they are None. The encoder's mask has no meaning
# without what the encoder has put out.
_KNOWN_ARGUMENTS = IGNORED_ARGUMENTS | {
    "attention_mask",
    "cache",
    "encoder_attention_mask",
    "past_key_values",
    "position_embeddings",
}


class LinearReplacement(Replacement):
    """A linear layer alone."""

    def __init__(self, module: nn.Module, matrix: Matrix) -> None:
        super().__init__(module)
        self.matrix = matrix
        self._watch = Watch.alone(module)

    def holds(self) -> bool:
        return self._watch.holds() and self.matrix.follow(compare=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.matrix.doubt()
            trained = linear_in_training(self.module, args[0]) if len(args) == 1 and not kwargs else None
            if trained is not None:
                return trained
        elif len(args) == 1 and not kwargs and is_plain_inference(args[0]) and self.holds():
            input: Tensor = args[0]
            if input.dtype == self.matrix.dtype and input.device == self.matrix.device:
                return decoder.linear(ops_for(input.dtype), self.matrix, input)
        return self.own(*args, **kwargs)


class NormReplacement(Replacement):
    """A norm alone."""

    def __init__(self, module: nn.Module, norm: Norm) -> None:
        super().__init__(module)
        self._norm = norm
        self._trains = is_rms(module)
        self._forward = type(module).forward
        self._watch = Watch.alone(module)

    def holds(self) -> bool:
        return self._watch.holds()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            known = len(args) == 1 and not kwargs and self._trains and type(self.module).forward is self._forward
            trained = norm_in_training(self.module, args[0]) if known else None
            if trained is not None:
                return trained
        elif len(args) == 1 and not kwargs and is_plain_inference(args[0]) and self.holds():
            input: Tensor = args[0]
            if self._norm.serves(input.dtype):
                return decoder.norm(ops_for(input.dtype), self._norm, input)
        return self.own(*args, **kwargs)


class Angles(threading.local):
    """Cosine and sine as our op takes them, of those that a model computed once for all of its layers."""

    def __init__(self) -> None:
        self._last: tuple[Any, tuple[Any, ...], tuple[Tensor, Tensor]] | None = None

    def of(self, embeddings: Any, hidden: Tensor, layer: Decoder) -> tuple[Tensor, Tensor] | None:
        """None if they are none for these tokens and the layer's heads."""
        last = self._last
        if last is not None and last[0] is embeddings and last[1] == _state_of(embeddings, hidden, layer):
            return last[2]
        if not _are_angles(embeddings, hidden, layer):
            return None
        working = torch.promote_types(embeddings[0].dtype, torch.float32)
        cos, sin = (part[..., : part.shape[-1] // 2].to(working).contiguous() for part in embeddings)
        if not any(part.is_inference() for part in embeddings):  # torch counts no changes of these
            self._last = (embeddings, _state_of(embeddings, hidden, layer), (cos, sin))
        return cos, sin


def _state_of(embeddings: tuple[Tensor, Tensor], hidden: Tensor, layer: Decoder) -> tuple[Any, ...]:
    """What angles that were computed depend on, next to the embeddings' identity."""
    versions = embeddings[0]._version, embeddings[1]._version
    return *versions, hidden.shape, hidden.device, layer.head_dim, layer.rotary_in_part


class Given(NamedTuple):
    """What a layer is given next to the hidden states, as the ops want it.

    Attributes:
        whole: whether one call may do, `decoder.run_whole`.
        grows: whether `growing_layer` may be asked for layers of the cache.
    """

    ops: Ops
    whole: bool
    mask: Tensor | None
    cache: Cache | None
    grows: bool
    angles: tuple[Tensor, Tensor] | None


class Row:
    """Decoder layers of a model, one after the other, and what they share in a pass.

    In a step of one token the first layer asks whether all are what they were found to be, and what its arguments mean.
    Those after it rely on that as long as each is given the tensor that the one before it has returned, and is called
    by the model's own loop: then nothing else has run in between. Asked by each layer, between kernels that read all
    weights, the same takes several times as long.

    Of layers that were given the same in the step before, the first one runs those after it as well, by one call. Each
    then returns what was made of the very tensor that it is given; called with anything else it computes as if nothing
    had been computed: caches count what was appended only when the layer is called.
    """

    def __init__(self) -> None:
        self.replacements: list[DecoderReplacement] = []
        self.angles = Angles()
        self._snapshot: _RowSnapshot | None = None
        # For each layer, up to which one those after it were given the same in the last step; none if that was odd.
        self._ends: list[int] = []
        self._step = _Step()

    def forget(self) -> None:
        """Something may have changed without being seen."""
        self._snapshot = None

    def end_step(self) -> None:
        """Keep nothing of a step of this thread that did not come to its end."""
        self._step.end()

    def goes_on(self, hidden: object) -> bool:
        """Whether all layers were asked in this step, and this is the next one; asked by a layer's forward alone."""
        step = self._step
        if step.count and hidden is step.last and step.loop is not None and _code_at(1 + step.depth) is step.loop:
            return True
        if step.last is not None:
            self._ends = []  # that step did not come to its end
            step.end()
        return False

    def given_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        """What a layer is given that `goes_on`, if one of the last before it in the step was given the same."""
        form, arguments = (len(args), *kwargs), (*args[1:], *kwargs.values())
        for kept in self._step.kept[-_KINDS:]:
            if form == kept.form and all(map(operator.is_, arguments, kept.arguments)):
                return kept.given
        return None

    def differs(self) -> None:
        """A layer of this step does something else than the others of its kind."""
        self._step.alike = False
        self._step.ahead.clear()

    def _are_in(self, cache: Cache | None, replacements: Sequence[DecoderReplacement]) -> bool:
        """Whether a cache has a layer for each, which nobody has to make before it is called."""
        layers: Any = () if cache is None else cache.layers
        indexes = [each.attention.layer_idx for each in replacements]
        return max(indexes) < len(layers) and all(layers[index].is_initialized for index in indexes)

    def take_ahead(self, replacement: DecoderReplacement, given: Given) -> Tensor | None:
        """What was made ahead of the hidden states that a layer is called with, which `goes_on`."""
        if not self._step.ahead:
            return None
        ahead = self._step.ahead.pop()
        if ahead.given is not given:  # the next step will know
            self._ends = []
            self._step.ahead.clear()
            return None
        if ahead.replacement is not replacement or not ahead.holds():
            self.differs()
            return None
        ahead.room.advance(1)
        return ahead.result

    def run_ahead(self, replacement: DecoderReplacement, hidden: Tensor, given: Given) -> Tensor | None:
        """Run a layer of a step and those after it by one call, if these will be given the same: its result."""
        step, snapshot, ends, first = self._step, self._snapshot, self._ends, self._step.count
        end = ends[first] if first < len(ends) else 0
        if snapshot is None or end - first < 2 or not (step.is_direct and step.alike and hidden is step.last):
            return None
        run = self.replacements[first:end]
        if run[0] is not replacement or not (given.whole and self._are_in(given.cache, run)):
            return None
        rooms = _alike(each.room(hidden, given) for each in run)
        if len(rooms) < 2:
            return None
        made = [room.make_room(1) for room in rooms]
        layers = snapshot.layers(first, first + len(rooms))
        results = decoder.run_whole(layers, hidden, made, given.mask, given.angles)
        if torch.is_inference_mode_enabled():  # of tensors that are made in it torch counts no changes
            with torch.inference_mode(False):
                results = [result.clone() for result in results]
        read = [
            _counted(before, *room[:-1], given.mask) for before, room in zip([hidden, *results], made, strict=False)
        ]
        versions = [[*map(version_of, each)] for each in read]
        step.ahead = [*map(_Ahead, run, repeat(given), results, rooms, made, read, versions)][:0:-1]
        rooms[0].advance(1)
        return results[0]

    def begin(self, replacement: DecoderReplacement, hidden: Tensor) -> bool:
        """Ask all layers, if this is the first one in a step of one token; False if each has to be asked by itself."""
        if self.replacements[:1] != [replacement] or hidden.shape[1] != 1:
            return False
        snapshot = self._snapshot  # other threads may forget it
        if snapshot is None and self._are_alike() and all(each.holds_apart(False) for each in self.replacements):
            snapshot = _RowSnapshot(self.replacements)
        elif snapshot is not None and not snapshot.holds():
            snapshot = None
        self._snapshot = snapshot
        if snapshot is not None:
            self._step.begin(hidden)
        return snapshot is not None

    def _are_alike(self) -> bool:
        """Whether all layers understand the same arguments alike."""
        return len({each.kind() for each in self.replacements}) == 1

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Given) -> None:
        """For the layers after this one of a step; asked by its forward alone."""
        step = self._step
        if args[0] is not step.last:
            return
        if not step.kept:
            step.depth, step.loop, step.is_direct = _loop_around(self.replacements[0].module)
        step.kept.append(_Kept((len(args), *kwargs), (*args[1:], *kwargs.values()), given))

    def ran(self, replacement: DecoderReplacement, hidden: Tensor, given: Given, result: Tensor) -> None:
        """A layer has made `result` of `hidden`."""
        step = self._step
        if hidden is not step.last:
            return
        step.last = result
        step.alike = step.alike and replacement is self.replacements[step.count]
        step.count += 1
        step.givens.append(given)
        if replacement is self.replacements[-1]:
            self._ends = _ends_of_runs(step.givens) if step.alike else []
            step.end()


def _ends_of_runs(values: Sequence[object]) -> list[int]:
    """For each value, up to which one those after it are the same."""
    ends = [len(values)] * len(values)
    for index in range(len(values) - 2, -1, -1):
        ends[index] = ends[index + 1] if values[index] is values[index + 1] else index + 1
    return ends


# So many kinds of layers a model may have, by what they are given.
_KINDS = 4


class _Kept(NamedTuple):
    """What a layer of a step was given.

    Attributes:
        form: how many arguments without names, and the names of the others.
        arguments: all but the first one.
        given: what these mean.
    """

    form: tuple[int | str, ...]
    arguments: tuple[Any, ...]
    given: Given


class _Ahead(NamedTuple):
    """What a layer was computed to make of hidden states.

    Attributes:
        given: next to the hidden states.
        room, made: where it will have appended, and what that was.
        read, versions: hidden states, keys, values and mask, and how often each was written; but for those that were
            made in inference mode, where torch does not count that.
    """

    replacement: DecoderReplacement
    given: Given
    result: Tensor
    room: AppendingLayer
    made: Room
    read: list[Tensor]
    versions: list[int]

    def holds(self) -> bool:
        """Whether all that it was made of is what it was."""
        return self.room.is_at(self.made) and [*map(version_of, self.read)] == self.versions


def _counted(*tensors: Tensor | None) -> list[Tensor]:
    """Those of which torch counts how often they are written."""
    return [each for each in tensors if each is not None and not each.is_inference()]


def _alike(rooms: Iterable[AppendingLayer | None]) -> list[AppendingLayer]:
    """The first ones, as many as have the same number of bits, hold as many positions, and are not the same layer."""
    found: list[AppendingLayer] = []
    kinds = set()
    for room in rooms:
        if room is None or any(room is each for each in found):
            break
        kinds.add((isinstance(room, Int8Layer), room.held))
        if len(kinds) > 1:
            break
        found.append(room)
    return found


class _Step(threading.local):
    """A step of one token whose layers were asked.

    Attributes:
        last: the hidden states, ``[batch, 1, hidden]``, that the next layer is given.
        count, alike: how many layers have run; whether these were the first ones, in their order, and by one call each.
        ahead: what those after it will make, the next one's last.
        depth, loop: how far up from a layer's forward the code is that calls the layers, and which it is.
        is_direct: whether nobody else's code, which may do more, is in between.
        kept: what layers were given, each once.
        givens: the same of each layer that has run.
    """

    last: Tensor | None = None
    count: int = 0
    alike: bool = True
    depth: int = 0
    is_direct: bool = False
    loop: types.CodeType | None = None

    def __init__(self) -> None:
        self.ahead: list[_Ahead] = []
        self.kept: list[_Kept] = []
        self.givens: list[Given] = []

    def begin(self, hidden: Tensor) -> None:
        self.last, self.count, self.alike = hidden, 0, True

    def end(self) -> None:
        """Keep nothing alive."""
        self.last, self.loop = None, None
        for each in (self.ahead, self.kept, self.givens):
            each.clear()


# The code that is between a layer's forward and the one who calls the layer; `inner` where the layer has had hooks.
_CALLS = {
    nn.Module._call_impl.__code__,
    nn.Module._wrapped_call_impl.__code__,
    GradientCheckpointingLayer.__call__.__code__,
}
_CALLS |= {each for each in nn.Module._call_impl.__code__.co_consts if isinstance(each, types.CodeType)}


def _loop_around(module: nn.Module) -> tuple[int, types.CodeType | None, bool]:
    """How far up from a layer's forward the code in the file of its class is that has called it, which it is, and
    whether there is nothing in between but `_CALLS`.
    """
    file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
    frame, depth, is_direct = sys._getframe(2), 0, True  # that which has called `Row.keep`
    while frame.f_back is not None and file is not None:
        frame, depth = frame.f_back, depth + 1
        if frame.f_code.co_filename == file:
            return depth, frame.f_code, is_direct
        is_direct = is_direct and frame.f_code in _CALLS
    return 0, None, False


def _code_at(depth: int) -> types.CodeType | None:
    """That of the caller so far up, or None if there are not so many."""
    try:
        return sys._getframe(1 + depth).f_code
    except ValueError:
        return None


class _RowSnapshot:
    """All layers as they were found."""

    def __init__(self, replacements: Sequence[DecoderReplacement]) -> None:
        self._replacements = replacements
        layers = [each.module for each in replacements]
        # Hooks of the layers themselves are called in between, and may change those that follow.
        self._watch = Watch.over(*layers, hooked=layers)
        self._attributes = [vars(layer) for layer in layers]
        matrices = [place for each in replacements for matrix in each.layer.matrices for place in matrix.held.places]
        norms = [place for each in replacements for norm in each.layer.norms for place in norm.places()]
        self._parameters = Snapshot([*matrices, *norms])
        self._layers: dict[tuple[int, int], decoder.Layers] = {}
        # What `DecoderReplacement.attends` asks: most layers share a configuration.
        self._attentions = [vars(each.attention) for each in replacements]
        self._configs = [each.config for each in replacements]
        self._different = list({id(each.config): each for each in replacements}.values())

    def layers(self, first: int, end: int) -> decoder.Layers:
        """Some of them, for `decoder.run_whole`."""
        found = self._layers.get((first, end))
        if found is None:
            found = self._layers[first, end] = decoder.Layers(*(each.layer for each in self._replacements[first:end]))
        return found

    def holds(self) -> bool:
        return (
            self._watch.holds()
            and self._parameters.holds()
            and all(map(operator.is_, map(dict.get, self._attributes, repeat("forward")), self._replacements))
            and all(map(operator.is_, map(dict.get, self._attentions, repeat("config")), self._configs))
            and all(each.attends() for each in self._different)
        )


class DecoderReplacement(Replacement):
    """A whole decoder layer, one of several in a row."""

    def __init__(
        self, module: nn.Module, attention: nn.Module, layer: Decoder, row: Row, cache: type[AppendingLayer]
    ) -> None:
        super().__init__(module)
        self.layer = layer
        self._cache = cache
        self.attention: Any = attention
        self.config = attention.config
        # A configuration's own attributes are found by Python code, which takes as long as all other checks.
        self._options = vars(attention.config)
        self._row = row
        self._alone = decoder.Layers(layer)
        self._names = tuple(inspect.signature(type(module).forward).parameters)[2:]
        self._watch = Watch.over(module)
        row.replacements.append(self)

    def take_off(self) -> None:
        super().take_off()
        self._row.end_step()
        # The row has all layers, and so all weights, which only Python's collector would free. Code that has wrapped
        # this forward may still call it, as a layer alone.
        self._row = Row()

    def holds(self) -> bool:
        return self.holds_apart(compare=True)

    def holds_apart(self, compare: bool) -> bool:
        """Asked of this layer alone; `compare` as in `Matrix.follow`."""
        return (
            self._watch.holds()
            and self.attends()
            and all(matrix.follow(compare) for matrix in self.layer.matrices)
            and all(norm.serves(self.layer.qkv.dtype) for norm in self.layer.norms)
        )

    def kind(self) -> tuple[Any, ...]:
        """What the meaning of its arguments depends on."""
        matrix = self.layer.qkv
        heads = self.layer.rotary, self.layer.rotary_in_part, self.layer.head_dim
        return type(self.module), matrix.dtype, matrix.device, *heads

    def attends(self) -> bool:
        """Whether its attention is ours still."""
        return (
            self.attention.config is self.config
            and self._options.get("_attn_implementation_internal") == ATTENTION
            and has_own_sdpa()
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._row.forget()
            for matrix in self.layer.matrices:
                matrix.doubt()
        elif 1 <= len(args) <= 1 + len(self._names):
            goes_on = self._row.goes_on(args[0])
            given = self._row.given_again(args, kwargs) if goes_on else None
            if given is None:
                given = self._understand(args, kwargs, goes_on)
                if given is not None:
                    self._row.keep(args, kwargs, given)
            if given is not None:
                return self._made_of(args[0], given)
        return self.own(*args, **kwargs)

    def _made_of(self, hidden: Tensor, given: Given) -> Tensor:
        try:
            result = self._row.take_ahead(self, given)
            result = self._row.run_ahead(self, hidden, given) if result is None else result
            result = self._run(hidden, given) if result is None else result
        except BaseException:
            self._row.end_step()
            raise
        self._row.ran(self, hidden, given, result)
        return result

    def _understand(self, args: tuple[Any, ...], kwargs: dict[str, Any], asked: bool) -> Given | None:
        """What the arguments mean; None if the ops do not do with them what the layer's own code does."""
        hidden = args[0]
        named = {**dict(zip(self._names, args[1:], strict=False)), **kwargs} if len(args) > 1 else kwargs
        if not self._serves(hidden, named, asked):
            return None
        embeddings, cache = named.get("position_embeddings"), _cache_in(named)
        angles = None if embeddings is None else self._row.angles.of(embeddings, hidden, self.layer)
        if (angles is None) == self.layer.rotary:
            return None
        dtype, mask = hidden.dtype, named.get("attention_mask")
        return Given(ops_for(dtype), decoder.has_whole(dtype), mask, cache, may_grow(cache), angles)

    def _serves(self, hidden: Tensor, named: dict[str, Any], asked: bool) -> bool:
        """Whether the layer is what it was found to be, and knows these arguments, if the embeddings are angles."""
        cache, layer = _cache_in(named), self.layer
        return (
            is_plain_inference(hidden)
            and hidden.dim() == 3
            and (named.keys() <= _KNOWN_ARGUMENTS or _are_known(named))
            and not named.get("output_attentions")
            and (cache is None or (isinstance(cache, Cache) and not isinstance(cache, EncoderDecoderCache)))
            # transformers 5.0 tells static caches where to write.
            and (named.get("cache_position") is None or cache is None or type(cache) is DynamicCache)
            and (named.get("position_embeddings") is None) != layer.rotary
            and (asked or self._row.begin(self, hidden) or self.holds_apart(compare=hidden.shape[1] > 1))
            and hidden.dtype == layer.qkv.dtype
            and hidden.device == layer.qkv.device
        )

    def _run(self, hidden: Tensor, given: Given) -> Tensor:
        room = self.room(hidden, given)
        if room is not None and given.whole and self.layer.is_one_call:
            made = room.make_room(hidden.shape[1])
            (result,) = decoder.run_whole(self._alone, hidden, [made], given.mask, given.angles)
            room.advance(hidden.shape[1])
            return result
        self._row.differs()
        if room is None:
            return decoder.run(given.ops, self.layer, hidden, given.angles, functools.partial(self._attend, given))
        attend = functools.partial(self._attend_in_place, given, room)
        result = decoder.run(given.ops, self.layer, hidden, given.angles, attend)
        room.advance(hidden.shape[1])
        return result

    def room(self, hidden: Tensor, given: Given) -> AppendingLayer | None:
        """Its layer of the cache, if the op can append to it and attend."""
        cache = given.cache
        if cache is None or not given.grows:
            return None
        room = growing_layer(cache, self.attention.layer_idx, self._cache)
        return room if room is not None and self._fits(room, hidden, given.mask) else None

    def _fits(self, room: AppendingLayer, hidden: Tensor, mask: Tensor | None) -> bool:
        """Whether the op can append and attend: if no mask says to which, only to all, or to all before a query."""
        batch, tokens, _ = hidden.shape
        layer = self.layer
        if not room.is_initialized:
            none = hidden.new_empty((batch, layer.kv_heads, 0, layer.head_dim))
            room.lazy_initialization(none, none)
        past = room.held
        if mask is not None:
            return mask_fits(mask, hidden.dtype, (batch, layer.heads, tokens), past + tokens)
        return tokens == 1 or (past == 0 and bool(self.attention.is_causal))

    def _attend_in_place(self, given: Given, room: AppendingLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        to, mask = room.make_room(key.shape[2]), given.mask
        scales = [each for each in (to.key_scales, to.value_scales) if each is not None]
        op = given.ops.cached_attention_int8 if scales else given.ops.cached_attention
        attended: Tensor = op(
            query, key, value, to.keys, to.values, *scales, to.past, self.layer.scale, mask, None, 0, mask is None
        )
        return attended

    def _attend(self, given: Given, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention, cache = self.attention, given.cache
        if cache is not None:
            key, value = cache.update(key, value, attention.layer_idx)
        attended, _ = attention_forward(attention, query, key, value, given.mask, scaling=self.layer.scale)
        return attended.transpose(1, 2)


def _cache_in(named: dict[str, Any]) -> Any:
    """By its name of transformers 5.24, which counts if both are given, or the one before."""
    return named["cache"] if "cache" in named else named.get("past_key_values")


def _are_known(named: dict[str, Any]) -> bool:
    """Whether arguments that are not known are None."""
    return all(value is None or name in _KNOWN_ARGUMENTS for name, value in named.items())


def _are_angles(embeddings: Any, hidden: Tensor, layer: Decoder) -> bool:
    return (
        isinstance(embeddings, tuple)
        and len(embeddings) == 2
        and all(
            type(part) is Tensor
            and part.dim() == 3
            and part.shape[0] in (1, hidden.shape[0])
            and part.shape[1] == hidden.shape[1]
            and _turns(part.shape[2], layer)
            and part.device == hidden.device
            for part in embeddings
        )
        and embeddings[0].shape[2] == embeddings[1].shape[2]
    )


def _turns(elements: int, layer: Decoder) -> bool:
    """Whether angles for so many elements of a head have a meaning."""
    return elements == layer.head_dim or (layer.rotary_in_part and 0 < elements < layer.head_dim and elements % 2 == 0)


__all__ = [
    "DecoderReplacement",
    "LinearReplacement",
    "NormReplacement",
    "Row",
]
