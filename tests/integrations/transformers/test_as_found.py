"""Whether objects and numbers are those that were found: asked in C, and by Python where there is no library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_plugin_sdk.integrations.transformers.as_found import AsFound
from ds_plugin_sdk.integrations.transformers.weights import Look, Samples
from ds_plugin_sdk.ops import decoder_layer

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


@pytest.fixture(params=["in C", "in Python"])
def asked_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decoder_layer.as_found is not None and decoder_layer.places is not None
    if request.param == "in Python":
        for name in ("as_found", "places", "samples"):
            monkeypatch.setattr(decoder_layer, name, None)


class Found:
    """One of each, and the question."""

    def __init__(self) -> None:
        self.module, self.empty = nn.Linear(4, 4), {}  # type: dict[int, object]
        self.named: dict[str, Any] = {"eps": 1e-5, "none": None}
        self.weight, self.square = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))
        self.as_found = AsFound(
            objects=[self.module],
            types=[nn.Linear],
            empty=[self.empty],
            named=[(self.named, name, self.named.get(name)) for name in ("eps", "none", "nowhere")],
            tensors=[self.weight, self.square, torch.zeros(0)],
        )


class Other(nn.Linear):
    pass


CHANGES: dict[str, Callable[[Found], object]] = {
    "another class": lambda found: setattr(found.module, "__class__", Other),
    "an item": lambda found: found.empty.update({1: None}),
    "another object": lambda found: found.named.update(eps=1e-6),
    "none any more": lambda found: found.named.pop("eps"),
    "one where none was": lambda found: found.named.update(none=0),
    "one where no name was": lambda found: found.named.update(nowhere=1),
    "by columns": lambda found: setattr(found.square, "data", found.square.data.t()),
    "elsewhere in memory": lambda found: setattr(found.weight, "data", torch.ones(4)),
    "of another dtype": lambda found: setattr(found.weight, "data", found.weight.data.view(torch.bfloat16)),
    "swapped": lambda found: torch.utils.swap_tensors(found.weight, nn.Parameter(torch.ones(4))),
}


@pytest.mark.usefixtures("asked_by")
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_seen(name: str) -> None:
    found = Found()
    assert found.as_found.holds() and found.as_found.holds()
    CHANGES[name](found)
    assert not found.as_found.holds()


@pytest.mark.usefixtures("asked_by")
def test_what_means_the_same_is_no_change() -> None:
    found = Found()
    del found.named["none"]
    found.named["nowhere"] = None
    found.weight.data.add_(1)
    assert found.as_found.holds()
    assert AsFound().holds()


@pytest.mark.usefixtures("asked_by")
def test_tensors_that_have_no_place_are_asked_by_python() -> None:
    """On the device meta torch gives C no address."""
    assert AsFound(tensors=[torch.empty(3, device="meta")]).holds()


@pytest.mark.usefixtures("asked_by")
@pytest.mark.parametrize("shape", [(), (0,), (5,), (255,), (16, 16), (3, 7, 257), (1024, 96)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_numbers_that_change_are_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = [torch.ones(3, dtype=dtype), torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)]
    samples = Samples(tensors)
    assert not samples.differ(tensors) and not samples.differ(each.clone() for each in tensors)
    if tensors[1].numel():
        tensors[1].data.add_(1)
        assert samples.differ(tensors)
    assert samples.differ(tensors[:1]) or not tensors[1].numel()


@pytest.mark.usefixtures("asked_by")
@pytest.mark.parametrize("look", [Look.FEW_ROWS, Look.MANY_ROWS])
def test_rows_that_change_are_seen(look: Look) -> None:
    weight = torch.zeros(1024, 96)
    samples = Samples([weight])
    weight[512:529] = 1  # a 64th of it
    assert samples.differ([weight], look)
    weight.zero_()
    weight[-1] = 1
    assert samples.differ([weight], look), "of the last row, too"
    weight.zero_()
    assert not samples.differ([weight], look)


@pytest.mark.usefixtures("asked_by")
@pytest.mark.parametrize("columns", [1, 5, 16, 96, 257])
def test_each_row_and_each_column_of_what_makes_logits_counts(columns: int) -> None:
    """As who writes the rows of new words does."""
    weight = torch.zeros(300, columns)
    samples = Samples([weight], one_of=1)
    for row in range(300):
        weight[row] = 1
        assert samples.differ([weight]), row
        weight[row] = 0
    for column in range(columns):
        weight[:, column] = 1
        assert samples.differ([weight]), column
        weight[:, column] = 0
    assert not samples.differ([weight])


@pytest.mark.usefixtures("asked_by")
@pytest.mark.parametrize("shape", [(896, 4864), (512, 3584), (1024, 1024), (64, 8192), (4096, 256)], ids=str)
@pytest.mark.parametrize("look", [Look.FEW_ROWS, Look.MANY_ROWS])
def test_no_part_of_a_matrix_is_left_out(shape: tuple[int, int], look: Look) -> None:
    """Few rows of many columns, too; a quarter of both is changed, wherever that lies."""
    weight = torch.zeros(shape)
    samples = Samples([weight])
    rows, columns = shape[0] // 4, shape[1] // 4
    for row in range(0, shape[0], rows):
        for column in range(0, shape[1], columns):
            part = weight[row : row + rows, column : column + columns]
            part.fill_(1)
            assert samples.differ([weight], look), (row, column)
            part.zero_()
    assert not samples.differ([weight], look)


@pytest.mark.usefixtures("asked_by")
def test_sparse_changes_are_seen() -> None:
    """As of adapters that add to a few numbers of each row: two of 1024."""
    torch.manual_seed(0)
    weight = torch.zeros(1024, 1024)
    samples = Samples([weight])
    weight.view(-1)[torch.randperm(1 << 20)[:2048]] = 1
    assert samples.differ([weight])


@pytest.mark.usefixtures("asked_by")
def test_columns_that_change_are_seen() -> None:
    weight = torch.zeros(512, 512)
    samples = Samples([weight])
    weight[:, 256:] = 1
    assert samples.differ([weight])


@pytest.mark.usefixtures("asked_by")
def test_what_lies_by_columns_is_looked_at_too() -> None:
    weight = torch.rand(96, 64).t()
    samples = Samples([weight])
    assert not samples.differ([weight])
    weight.neg_()
    assert samples.differ([weight])


def test_what_is_no_question_is_answered_with_no() -> None:
    ask, places = decoder_layer.as_found, decoder_layer.places
    assert ask is not None and places is not None
    assert ask() == ask(1, 2, 3, 4, 5, 6, 7, b"") == 0
    assert ask([1], [], [], [], [], [], [], b"") == 0
    assert ask([], [], [3], [], [], [], [], b"") == 0
    assert ask([], [], [], [], [], [], [3], b"") == 0
    for each in (places, decoder_layer.samples):
        assert each is not None and each() is None and each(3) is None and each([3]) is None
