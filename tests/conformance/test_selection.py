"""Which cases a pattern names, and which a selection picks."""

from __future__ import annotations

import pytest

from ds_plugin_sdk.conformance.outcome import Item
from ds_plugin_sdk.conformance.selection import Selection, matches
from ds_plugin_sdk.errors import ConformanceError


def item(case: str, **parameters: str) -> Item:
    check = case.split("/", maxsplit=1)[0]
    return Item(case, check, check.split(".")[0], parameters, "R1.1", "", "")


ITEMS = [
    item("runtime.device.set"),
    item("runtime.device.set_out_of_range"),
    item("ops.accuracy/adam_/float32", op="adam_", dtype="float32"),
    item("ops.accuracy/adam_/bfloat16", op="adam_", dtype="bfloat16"),
    item("ops.accuracy/lion_/float32", op="lion_", dtype="float32"),
]


@pytest.mark.parametrize(
    ("pattern", "case", "holds"),
    [
        ("a.b/c", "a.b/c", True),
        ("a.b/c", "a.b/cd", False),
        ("a.b/c", "aXb/c", False),
        ("a.b/*", "a.b/c/d", True),
        ("*/d", "a.b/c/d", True),
        ("a*c*", "a.b/c/d", True),
        ("a.b/[c]", "a.b/[c]", True),
        ("a.b/[c]", "a.b/c", False),
        ("a?b", "a.b", False),
    ],
)
def test_a_pattern_is_an_id_with_stars(pattern: str, case: str, holds: bool) -> None:
    assert matches(pattern, case) == holds


@pytest.mark.parametrize(
    ("selection", "cases"),
    [
        (Selection(), [0, 1, 2, 3, 4]),
        (Selection(levels=["runtime"]), [0, 1]),
        (Selection(levels=["runtime", "ops"], ops=["adam_"]), [2, 3]),
        (Selection(dtypes=["float32"]), [2, 4]),
        (Selection(ops=["adam_"], dtypes=["float32"]), [2]),
        (Selection(patterns=["runtime.device.set"]), [0]),  # an id is that case alone
        (Selection(patterns=["device.set"]), [0, 1]),
        (Selection(patterns=["*/float32"]), [2, 4]),
        (Selection(patterns=["lion", "out_of"]), [1, 4]),
        (Selection(patterns=["nothing of the kind"]), []),
    ],
)
def test_a_selection_picks_in_order(selection: Selection, cases: list[int]) -> None:
    assert selection.of(ITEMS) == [ITEMS[i] for i in cases]


@pytest.mark.parametrize("selection", [Selection(ops=["adam_", "adm_"]), Selection(ops=["adm_"], levels=["runtime"])])
def test_an_op_of_no_case_is_an_error_beside_others_too(selection: Selection) -> None:
    with pytest.raises(ConformanceError, match="no case has the op 'adm_'"):
        selection.of(ITEMS)


def test_a_dtype_of_no_case_is_an_error() -> None:
    with pytest.raises(ConformanceError, match="no case has the dtype 'bf16'"):
        Selection(dtypes=["bf16"]).of(ITEMS)
