"""Whether objects and parameters are where they were found.

It is asked at each step of a model whose weights have just pushed Python's objects out of the caches: lists are gone
over by functions in C, and nothing is computed again that can be kept.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_plugin_sdk.ops import decoder_layer

version_of, _kind = operator.attrgetter("_version"), operator.attrgetter("dtype", "shape")


class AsFound:
    """Objects where they were found. That they are is asked by one call in C where there is a library for it.

    Args:
        objects, types: of what class each is.
        empty: dictionaries that have nothing in them.
        named: of other dictionaries what each has by a name, or None.
        tensors: where they are in memory, of which dtype, and whether they lie by rows.
    """

    def __init__(
        self,
        objects: Sequence[object] = (),
        types: Sequence[type] = (),
        empty: Sequence[dict[Any, Any]] = (),
        named: Iterable[tuple[dict[str, Any], str, object]] = (),
        tensors: Sequence[Tensor] = (),
    ) -> None:
        named = [*named]
        self._dicts, self._names = [each[0] for each in named], [each[1] for each in named]
        self._values: list[Any] = [each[2] for each in named]
        self._objects, self._types, self._empty, self._tensors = [*objects], [*types], [*empty], [*tensors]
        self._places = _places_of(self._tensors)
        lists = self._objects, self._types, self._empty, self._dicts, self._names, self._values, self._tensors
        self._all: tuple[Any, ...] = (*lists, self._places)

    def holds(self) -> bool:
        ask = decoder_layer.as_found
        if ask is not None and type(self._places) is bytes:
            return ask(*self._all) == 1
        return (
            [type(each) for each in self._objects] == self._types
            and not any(self._empty)
            and all(map(operator.is_, map(dict.get, self._dicts, self._names), self._values))
            and _places_of(self._tensors) == self._places
        )


def _places_of(tensors: list[Tensor]) -> bytes | list[tuple[int, int, torch.dtype, bool]]:
    """What tells whether tensors are where they were, and as large; bytes for C."""
    found = None if decoder_layer.places is None else decoder_layer.places(tensors)
    if found is not None:
        return found
    return [(each.data_ptr(), each.numel(), each.dtype, each.is_contiguous()) for each in tensors]


class Place(NamedTuple):
    """Where a parameter, or a buffer, is kept.

    Attributes:
        moved: whether it was moved into other memory, where it must stay.
        counted: whether changes of its numbers matter, as far as torch counts them.
    """

    owner: dict[str, Any]
    name: str
    moved: bool = True
    counted: bool = False

    @property
    def tensor(self) -> Any:
        """What is there now, or None."""
        return self.owner.get(self.name)


class Snapshot:
    """Parameters as they are now; `holds` tells later whether their places have the same ones, where they were."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self.places = tuple(places)
        self._owners = [place.owner for place in self.places]
        self._names = [place.name for place in self.places]
        self._all = [*map(dict.get, self._owners, self._names)]
        some = [(each, place) for each, place in zip(self._all, self.places, strict=True) if each is not None]
        self.moved: list[Tensor] = [parameter for parameter, place in some if place.moved]
        self.addresses = [*map(Tensor.data_ptr, self.moved)]
        self._counted = [parameter for parameter, place in some if place.counted]
        self._versions = [*map(version_of, self._counted)]
        self._unmoved = [parameter for parameter, place in some if not place.moved]
        self._kinds = [*map(_kind, self._unmoved)]
        self._found = AsFound(named=zip(self._owners, self._names, self._all, strict=True), tensors=self.moved)

    def holds(self) -> bool:
        return (
            self._found.holds()
            and [*map(_kind, self._unmoved)] == self._kinds
            and [*map(version_of, self._counted)] == self._versions
        )

    def counts(self, parameter: Tensor) -> bool:
        """Whether changes of its numbers matter."""
        return any(parameter is counted for counted in self._counted)


__all__ = ["AsFound", "Place", "Snapshot", "version_of"]
