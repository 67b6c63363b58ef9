"""Decoder layers in a step of one token: all are asked once, and those that are given the same run by one call."""

from __future__ import annotations

import operator
import sys
import threading
import types
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_plugin_sdk.integrations.transformers import decoder
from ds_plugin_sdk.integrations.transformers.decoder import Decoder, Ops
from ds_plugin_sdk.integrations.transformers.kv_cache import AppendingLayer, Int8Layer, Room
from ds_plugin_sdk.integrations.transformers.understood import Snapshot, Watch, version_of

if TYPE_CHECKING:
    from ds_plugin_sdk.integrations.transformers.replacements import DecoderReplacement


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


class Given(NamedTuple):
    """What a layer is given next to the hidden states, as the ops want it.

    Attributes:
        functions: for one call of several layers, `decoder.run_whole`; None if it may not be made.
        grows: whether `growing_layer` may be asked for layers of the cache.
    """

    ops: Ops
    functions: int | None
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
        functions = given.functions
        if run[0] is not replacement or functions is None or not self._are_in(given.cache, run):
            return None
        rooms = _alike(each.room(hidden, given) for each in run)
        if len(rooms) < 2:
            return None
        made = [room.make_room(1) for room in rooms]
        layers = snapshot.layers(first, first + len(rooms))
        results = decoder.run_whole(layers, hidden, made, given.mask, given.angles, functions)
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


__all__ = ["Given", "Row"]
