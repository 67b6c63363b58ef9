"""Decoder layers in a step of one token: all are asked once, and run by one call as far as what they get is known."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ds_plugin_sdk.integrations.transformers import decoder, kv_cache
from ds_plugin_sdk.integrations.transformers.as_found import AsFound, Snapshot, version_of
from ds_plugin_sdk.integrations.transformers.decoder import Decoder, Ops, Turn
from ds_plugin_sdk.integrations.transformers.kv_cache import AppendingLayer, Room
from ds_plugin_sdk.integrations.transformers.layer_loop import LayerLoop
from ds_plugin_sdk.integrations.transformers.understood import are_idle, hooks_of
from ds_plugin_sdk.integrations.transformers.watch import Watch
from ds_plugin_sdk.integrations.transformers.weights import Look

if TYPE_CHECKING:
    from ds_plugin_sdk.integrations.transformers.replacements import DecoderReplacement


class Angles(threading.local):
    """Cosine and sine as our op takes them, of those that a model computed once for all of its layers."""

    def __init__(self) -> None:
        self._last: tuple[Any, tuple[Any, ...], tuple[Tensor, Tensor]] | None = None
        self._trusted: set[str] = set()  # types of devices on which pairs were seen to have one angle

    def of(self, embeddings: Any, hidden: Tensor, layer: Decoder) -> tuple[Tensor, Tensor] | None:
        """None if they are none for these tokens and the layer's heads, or the elements of a pair have two angles."""
        last = self._last
        if last is not None and last[0] is embeddings and last[1] == _state_of(embeddings, hidden, layer):
            return last[2]
        if not _are_angles(embeddings, hidden, layer) or not self._are_of_pairs(embeddings, layer):
            return None
        working = torch.promote_types(embeddings[0].dtype, torch.float32)
        cos, sin = (part[..., : part.shape[-1] // 2].to(working).contiguous() for part in embeddings)
        if not any(part.is_inference() for part in embeddings):  # torch counts no changes of these
            self._last = (embeddings, _state_of(embeddings, hidden, layer), (cos, sin))
        return cos, sin

    def _are_of_pairs(self, embeddings: tuple[Tensor, Tensor], layer: Decoder) -> bool:
        """Whether both halves are the same, of which the op reads the first; code for neighbours reads no other."""
        device = embeddings[0].device.type
        if layer.turn != Turn.HALVES or device in self._trusted:
            return True
        alike = all(torch.equal(*part.chunk(2, dim=-1)) for part in embeddings)
        if alike and device != "cpu":  # another device is waited for once, not in each step
            self._trusted.add(device)
        return alike


def _state_of(embeddings: tuple[Tensor, Tensor], hidden: Tensor, layer: Decoder) -> tuple[Any, ...]:
    """What angles that were computed depend on, next to the embeddings' identity."""
    versions = embeddings[0]._version, embeddings[1]._version
    return *versions, hidden.shape, hidden.device, layer.head_dim, layer.rotary_in_part, layer.turn


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

    def goes_with(self, other: Given) -> bool:
        """Whether a layer that is given the other can be in one call with one that is given this."""
        return self.functions == other.functions and self.cache is other.cache and self.grows == other.grows


class Row:
    """Decoder layers of a model, one after the other, and what they share in a pass.

    In a step of one token the first layer asks whether all are what they were found to be, and what its arguments mean.
    Those after it rely on that as long as each is given the tensor that the one before it has returned, and is called
    by the model's own loop: then nothing else has run in between. Asked by each layer, between kernels that read all
    weights, the same takes several times as long.

    The first layer runs those after it as well, by one call: as far as they were given, in the step before, what layers
    of this step have been given already. Each then returns what was made of the very tensor that it is given; called
    with anything else it computes as if nothing had been computed: caches count what was appended only when the layer
    is called.
    """

    def __init__(self) -> None:
        self.replacements: list[DecoderReplacement] = []
        self.angles = Angles()
        self._snapshot: _RowSnapshot | None = None
        # What each layer was given in the last step, by its place among all that it kept; none if that step was odd.
        self._kinds: list[int] = []
        self._steps = _Steps()

    def forget(self) -> None:
        """Something may have changed without being seen."""
        self._snapshot = None

    def end_step(self) -> None:
        """Keep nothing of a step of this thread that did not come to its end."""
        self._steps.current.end()

    def goes_on(self, hidden: object) -> bool:
        """Whether all layers were asked in this step, and this is the next one; asked by a layer's forward alone."""
        step = self._steps.current
        if step.count and hidden is step.last and step.loop.goes_on():
            return True
        if step.last is not None:
            self._kinds = []  # that step did not come to its end
            step.end()
        return False

    def given_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        """What a layer is given that `goes_on`, if one of the last before it in the step was given the same."""
        form, arguments = (len(args), *kwargs), (*args[1:], *kwargs.values())
        for kept in self._steps.current.kept[-_KINDS:]:
            if form == kept.form and all(map(operator.is_, arguments, kept.arguments)):
                return kept.given
        return None

    def differs(self) -> None:
        """A layer of this step does something else than the others of its kind."""
        step = self._steps.current
        step.alike, step.ahead = False, None

    def take_ahead(self, replacement: DecoderReplacement, given: Given) -> Tensor | None:
        """What was made ahead of the hidden states that a layer is called with, which `goes_on`."""
        step = self._steps.current
        ahead = step.ahead
        if ahead is None:
            return None
        if ahead.given is not given:  # the next step will know
            self._kinds = []
            step.ahead = None
            return None
        if not ahead.is_of(replacement):
            self.differs()
            return None
        result = ahead.take()
        if not ahead.left:
            step.ahead = None
        return result

    def run_ahead(self, replacement: DecoderReplacement, hidden: Tensor, given: Given) -> Tensor | None:
        """Run a layer of a step and those after it by one call, as far as what they are given is known: its result."""
        step, snapshot, functions = self._steps.current, self._snapshot, given.functions
        if not (step.loop.is_direct and step.alike and hidden is step.last) or snapshot is None or functions is None:
            return None
        first, kept = step.count, [each.given for each in step.kept]
        run, kinds = self.replacements[first:], _known_kinds(self._kinds[first:], kept, given)
        if len(kinds) < 2 or run[0] is not replacement:
            return None
        givens = [kept[kind] for kind in kinds]
        rooms = _rooms_of(run, hidden, givens)
        end = len(rooms)
        if end < 2:
            return None
        made, past = [room.make_room(1) for room in rooms], [room.held for room in rooms]
        caches, of_kinds = [*chain.from_iterable(made)], [(each.mask, each.angles) for each in kept]
        layers = snapshot.layers(first, first + end)
        results = decoder.run_whole(layers, hidden, caches, past, of_kinds, kinds[:end], functions)
        is_plain = step.loop.is_plain
        if not is_plain and torch.is_inference_mode_enabled():  # of tensors that are made in it torch counts no changes
            with torch.inference_mode(False):
                results = [result.clone() for result in results]
        step.ahead = _Ahead(zip(run, givens, rooms, past, made, strict=False), [hidden, *results], is_plain)
        return step.ahead.take()

    def begin(self, replacement: DecoderReplacement, hidden: Tensor) -> bool:
        """Ask all layers, if this is the first one in a step of one token; False if each has to be asked by itself."""
        if self.replacements[:1] != [replacement] or hidden.shape[1] != 1:
            return False
        snapshot = self._snapshot  # other threads may forget it
        if snapshot is None and self._can_be_asked_once():
            snapshot = _RowSnapshot(self.replacements)
        elif snapshot is not None and not snapshot.holds():
            snapshot = None
        self._snapshot = snapshot
        if snapshot is not None:
            self._steps.current.begin(hidden)
        return snapshot is not None

    def _can_be_asked_once(self) -> bool:
        """Whether all layers hold, understand the same arguments alike, and have no hooks, which may change others."""
        return (
            are_idle([hooks for each in self.replacements for hooks in hooks_of(each.module)])
            and len({each.kind() for each in self.replacements}) == 1
            and all(each.holds_apart(Look.NONE) for each in self.replacements)
            and not any(vars(each.module).get(_COMPILED) for each in self.replacements)  # steps are not known to Dynamo
        )

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Given) -> None:
        """For the layers after this one of a step; asked by its forward alone."""
        step = self._steps.current
        if args[0] is not step.last:
            return
        if not step.kept:
            step.loop = LayerLoop.around(self.replacements[0].module)
        step.kept.append(_Kept((len(args), *kwargs), (*args[1:], *kwargs.values()), given))

    def ran(self, replacement: DecoderReplacement, hidden: Tensor, given: Given, result: Tensor) -> None:
        """A layer has made `result` of `hidden`."""
        step = self._steps.current
        if hidden is not step.last:
            return
        step.last = result
        step.alike = step.alike and replacement is self.replacements[step.count]
        step.count += 1
        step.givens.append(given)
        if replacement is self.replacements[-1]:
            self._kinds = _kinds_of(step.givens) if step.alike else []
            step.end()


def _kinds_of(values: Sequence[object]) -> list[int]:
    """For each value, which of the different ones it is, in the order in which these come."""
    places: dict[int, int] = {}
    return [places.setdefault(id(value), len(places)) for value in values]


def _known_kinds(kinds: Sequence[int], kept: Sequence[Given], given: Given) -> list[int]:
    """Those of a layer and the ones after it in the last step: the first of them, as many as this step has kept and can
    be in one call; none if the layer is given something else now.
    """
    known = range(max(len(kept) - _KINDS, 0), len(kept))
    found = [*takewhile(lambda kind: kind in known and given.goes_with(kept[kind]), kinds)]
    return found if found and kept[found[0]] is given else []


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


def _rooms_of(run: Sequence[DecoderReplacement], hidden: Tensor, givens: Sequence[Given]) -> list[AppendingLayer]:
    """Where layers append to, the first ones that one call can be made for; none that is not made yet."""
    if givens[0].cache is None or not givens[0].grows:
        return []
    rooms = kv_cache.alike(givens[0].cache, map(_layer_index, run[: len(givens)]), hidden)
    fits = all(
        given.mask is None or each.fits(room, hidden, given.mask)
        for each, given, room in zip(run, givens, rooms, strict=False)
    )
    return rooms if fits else []


_layer_index = operator.attrgetter("attention.layer_idx")


class _Made(NamedTuple):
    """What one layer of a run was computed to make.

    Attributes:
        replacement, given: the layer, and what it was given next to the hidden states.
        room, past, made: where it appends to: a layer of the cache, how much that held, and its tensors.
        read, versions: tensors that the layer reads and torch counts the writes of, and how often each was written.
        result: the hidden states after it.
    """

    replacement: DecoderReplacement
    given: Given
    room: AppendingLayer
    past: int
    made: Room
    read: list[Tensor]
    versions: list[int]
    result: Tensor


class _Ahead:
    """What the layers of a run were computed to make of hidden states, as far as it was not taken yet.

    Attributes:
        left: how many layers are left.
    """

    def __init__(
        self,
        run: Iterable[tuple[DecoderReplacement, Given, AppendingLayer, int, Room]],
        hidden: Sequence[Tensor],
        is_plain: bool,
    ) -> None:
        """
        Args:
            run: the layers, as `_Made` begins.
            hidden: what is before the first layer, and after each.
            is_plain: whether nothing but these layers runs until all were taken.
        """
        self._is_plain = is_plain
        self._layers: list[_Made] = []
        for layer, before, result in zip(run, hidden, hidden[1:], strict=False):
            read = [] if is_plain else _counted(before, *layer[-1], layer[1].mask)
            self._layers.append(_Made(*layer, read, [*map(version_of, read)], result))
        self._layers.reverse()
        self.left = len(self._layers)

    @property
    def given(self) -> Given:
        """What the next one is given."""
        return self._layers[-1].given

    def is_of(self, replacement: DecoderReplacement) -> bool:
        """Whether the next one is of a layer, and all that it was made of is what it was."""
        layer = self._layers[-1]
        return layer.replacement is replacement and (
            self._is_plain
            or (
                self._holds(layer)
                and layer.room.grows
                and layer.room.held == layer.past
                and layer.room.make_room(1) is layer.made
                and [*map(version_of, layer.read)] == layer.versions
            )
        )

    def _holds(self, layer: _Made) -> bool:
        """Whether its room is still a layer of the cache, and not empty again."""
        index = layer.replacement.attention.layer_idx
        layers: Any = () if layer.given.cache is None else layer.given.cache.layers
        return index < len(layers) and layers[index] is layer.room and layer.room.is_initialized

    def take(self) -> Tensor:
        """The next one: its keys and values are held from now on."""
        layer = self._layers.pop()
        self.left -= 1
        layer.room.advance(1)
        return layer.result


def _counted(*tensors: Tensor | None) -> list[Tensor]:
    """Those of which torch counts how often they are written: not those that were made in inference mode."""
    return [each for each in tensors if each is not None and not each.is_inference()]


_NO_LOOP = LayerLoop()
_COMPILED = "_compiled_call_impl"  # what nn.Module.compile() leaves


class _Step:
    """A step of one token whose layers were asked.

    Attributes:
        last: the hidden states, ``[batch, 1, hidden]``, that the next layer is given.
        count, alike: how many layers have run; whether these were the first ones, in their order, and by one call each.
        ahead: what those after it will make.
        loop: what calls the layers.
        kept: what layers were given, each once.
        givens: the same of each layer that has run.
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.count, self.alike = 0, True
        self.ahead: _Ahead | None = None
        self.loop = _NO_LOOP
        self.kept: list[_Kept] = []
        self.givens: list[Given] = []

    def begin(self, hidden: Tensor) -> None:
        self.last, self.count, self.alike = hidden, 0, True

    def end(self) -> None:
        """Keep nothing alive."""
        self.last = self.ahead = None
        self.loop = _NO_LOOP
        self.kept.clear()
        self.givens.clear()


class _Steps(threading.local):
    """That of each thread."""

    def __init__(self) -> None:
        self.current = _Step()


class _RowSnapshot:
    """All layers as they were found."""

    def __init__(self, replacements: Sequence[DecoderReplacement]) -> None:
        self._replacements = replacements
        layers = [each.module for each in replacements]
        # Hooks of the layers themselves are called in between, and may change those that follow.
        self._watch = Watch.over(*layers, hooked=layers)
        matrices = [place for each in replacements for matrix in each.layer.matrices for place in matrix.held.places]
        norms = [place for each in replacements for norm in each.layer.norms for place in norm.places()]
        self._parameters = Snapshot([*matrices, *norms])
        self._layers: dict[tuple[int, int], decoder.Layers] = {}
        found: list[tuple[dict[str, Any], str, object]] = [
            (vars(each.module), "forward", each.forward) for each in replacements
        ]
        found += [(vars(each.module), _COMPILED, None) for each in replacements]
        # What `DecoderReplacement.attends` asks: most layers share a configuration.
        found += [(vars(each.attention), "config", each.config) for each in replacements]
        found += [(vars(each.module), "training", False) for each in replacements if each.layer.is_rounded]
        self._found = AsFound(named=found)
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
            and self._found.holds()
            and all(each.attends() for each in self._different)
        )


__all__ = ["Given", "Row"]
