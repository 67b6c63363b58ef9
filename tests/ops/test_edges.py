"""Calls at the edges of what ops take: kernel, reference and formula agree, or both reject. `sdk fuzz` found them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_plugin_sdk.conformance import fuzz, op_info
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.ops.linear import quantize_weight
from ds_plugin_sdk.ops.quantizer import fake_quantize_
from edges import AGREE, REJECTED

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("compiled_once"), pytest.mark.timeout(900)]


@pytest.fixture
def compare() -> Callable[[str, dict[str, Any], str], tuple[str, bool]]:
    target = Target.find("cpu")
    fuzz.start(target)
    return lambda op, arguments, kind: fuzz.compare(target, op_info.find(op), arguments, {}, {kind})


@pytest.mark.parametrize("call", AGREE)
def test_kernel_reference_and_formula_agree(call: str, compare: Callable[..., tuple[str, bool]]) -> None:
    op, arguments = AGREE[call]
    assert compare(op, arguments, "special") == ("", False)


@pytest.mark.parametrize("call", REJECTED)
def test_kernel_and_reference_reject(call: str, compare: Callable[..., tuple[str, bool]]) -> None:
    op, arguments = REJECTED[call]
    assert compare(op, arguments, "wrong") == ("", True)


@pytest.mark.usefixtures("compare")
def test_groups_without_elements_take_no_time() -> None:
    x = torch.ones(0)
    fake_quantize_(x, groups=2**62)
    assert x.numel() == 0


def test_weights_without_rows_are_quantized() -> None:
    weight, scales = quantize_weight(torch.ones(0, 256), 128)
    assert weight.shape == (0, 256)
    assert scales.shape == (0, 2)


def test_a_long_sequence_is_sorted_by_comparing() -> None:
    """Rows far shorter than the sequence, of every length around a heap's levels."""
    fuzz.start(Target.find("cpu"))
    for count in range(20):
        indices = torch.randint(0, 10**6, (3, count), generator=torch.Generator().manual_seed(count)).int()
        arguments = {"indices": indices, "seq_len": 10**6}
        found = fuzz.compare(Target.find("cpu"), op_info.find("token_sort_"), arguments, {}, {"layout"})
        assert found == ("", False)
