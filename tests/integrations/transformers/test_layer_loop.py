"""What a model's loop does between the calls of its layers is read from its source."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import textwrap
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_plugin_sdk.integrations.transformers import layer_loop
from ds_plugin_sdk.integrations.transformers.layer_loop import LayerLoop

_MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def forward(self, hidden, *args, **kwargs):
        self.ask(self)
        return hidden

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.kinds = nn.ModuleList(Layer() for _ in range(3)), ["full"] * 3
        self.__dict__["kept"] = [*self.layers]

    def forward(self, hidden, masks, **kwargs):
        '''A text
            of two lines.'''
        positions = torch.arange(3)
        {loop}
        return hidden
"""

ALONE = [
    "for layer in self.layers: hidden = layer(hidden)",
    "for layer in self.layers[:2]:\n    hidden = layer(hidden, mask=masks, **kwargs)",
    "for i, layer in enumerate(self.layers):\n    hidden = layer(hidden, masks[self.kinds[i]])",
    "for i, layer in enumerate(self.layers):\n    kind = self.kinds[i]\n    hidden = layer(hidden, masks[kind])",
    "for layer in self.layers:\n    hidden = layer(hidden, masks if self.training else 0)",
    "for kind in self.kinds:\n    positions = positions + 1\nfor layer in self.layers:\n    hidden = layer(hidden)",
]
NOT_ALONE = [
    "for layer in self.layers:\n    hidden = layer(hidden)\n    hidden += 1",
    "for layer in self.layers:\n    hidden = layer(hidden) + 1",
    "for layer in self.layers:\n    hidden = layer(hidden + 1)",
    "for layer in self.layers:\n    hidden = layer(hidden, masks['full'].add_(1))",
    "for layer in self.layers:\n    positions.add_(1)\n    hidden = layer(hidden)",
    "for layer in self.layers:\n    if self.training: continue\n    hidden = layer(hidden)",
    "for layer in self.layers:\n    other = layer(hidden)",
    "for layer in map(self.bring, self.layers):\n    hidden = layer(hidden)",
    "for layer, kind in zip(self.layers, self.kinds):\n    hidden = layer(hidden)",
    "layers = (self.bring(layer) for layer in self.layers)\nfor layer in layers:\n    hidden = layer(hidden)",
    "for layer in self.layers[1:]:\n    hidden = layer(hidden)",
    "for layer in self.kept:\n    hidden = layer(hidden)",
    "for _ in range(2):\n    for layer in self.layers:\n        hidden = layer(hidden)",
    "hidden = [layer(hidden) for layer in self.layers][-1]",
    "i = 0\nwhile i < 3:\n    hidden = self.layers[i](hidden)\n    i += 1",
    "hidden = self.layers[0](hidden)",
]


@pytest.fixture
def model_of(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    names: list[str] = []

    def make(loop: str) -> Any:
        names.append(f"loops_of_a_test_{len(names)}")
        file = tmp_path / f"{names[-1]}.py"
        file.write_text(_MODEL.format(loop=textwrap.indent(loop, " " * 8).lstrip()))
        spec = importlib.util.spec_from_file_location(names[-1], file)
        assert spec is not None and spec.loader is not None
        sys.modules[names[-1]] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.Model().eval()
        model.bring = lambda layer: layer
        return model

    yield make
    for name in names:
        del sys.modules[name]


def loops(model: Any) -> list[LayerLoop]:
    """What each layer finds around it."""
    found: list[LayerLoop] = []
    for layer in model.layers:
        layer.ask = lambda layer: found.append(LayerLoop.around(layer))
    model(0, {"full": types.SimpleNamespace(add_=lambda _: None)})
    return found


@pytest.mark.parametrize("loop", ALONE)
def test_a_loop_that_calls_its_layers_alone(loop: str, model_of: Callable[[str], Any]) -> None:
    assert {(each.is_direct, each.is_plain) for each in loops(model_of(loop))} == {(True, True)}


@pytest.mark.parametrize("loop", NOT_ALONE)
def test_a_loop_that_does_more(loop: str, model_of: Callable[[str], Any]) -> None:
    found = loops(model_of(loop))
    assert found and not any(each.is_plain for each in found)


class Streamed(nn.ModuleList):
    """Its layers' weights are there as long as they run alone."""

    def __iter__(self) -> Iterator[Any]:
        yield from self._modules.values()


def test_who_brings_the_layers_is_in_between(model_of: Callable[[str], Any]) -> None:
    for loop in (ALONE[0], "for layer in self.layers:\n    hidden = layer(hidden) + 1"):
        model = model_of(loop)
        model.layers = Streamed(model.layers)
        assert {(each.is_direct, each.is_plain) for each in loops(model)} == {(False, False)}


def test_nothing_of_a_call_is_kept(model_of: Callable[[str], Any]) -> None:
    model, mask = model_of(ALONE[1]), torch.zeros(1)
    kept: list[LayerLoop] = []
    seen = weakref.ref(mask)
    for layer in model.layers:
        layer.ask = lambda layer: kept.append(LayerLoop.around(layer))
    model(0, mask)
    del mask
    assert kept[0].is_plain and seen() is None


@pytest.mark.parametrize("text", ["", "raise SyntaxError", '"""', "\0", _MODEL.format(loop=NOT_ALONE[0]), _MODEL[:330]])
def test_a_file_that_is_not_what_was_imported_says_nothing(text: str, model_of: Callable[[str], Any]) -> None:
    model = model_of(ALONE[0])
    layer_loop._source_of.cache_clear()  # the same code in another file
    Path(sys.modules[type(model).__module__].__file__ or "").write_text(text)
    linecache.clearcache()
    assert not any(each.is_plain for each in loops(model))


def test_it_goes_on_at_the_same_instruction_of_the_same_call(model_of: Callable[[str], Any]) -> None:
    model = model_of(f"{ALONE[0]}\n{ALONE[0]}")
    answers: list[list[bool]] = []
    first: list[LayerLoop] = []

    def ask(layer: Any) -> None:
        first.append(LayerLoop.around(layer))
        answers.append([])
        for each in first:  # a list's own loop would be a call more
            answers[-1].append(each.goes_on())

    for layer in model.layers:
        layer.ask = ask
    model(0, {})
    assert answers[2] == [True] * 3  # in the first loop
    assert answers[5] == [False] * 3 + [True] * 3
    assert not LayerLoop().goes_on()
