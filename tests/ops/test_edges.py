"""Calls at the edges of what ops take: kernel, reference and formula agree, or both reject. `sdk fuzz` found them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.conformance import fuzz, op_info
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.ops.linear import quantize_weight
from ds_plugin_sdk.ops.quantizer import fake_quantize_

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("compiled_once"), pytest.mark.timeout(900)]

INT32_MAX = 2**31 - 1


def _attention(**changes: Any) -> dict[str, Any]:
    names = ("query", "key", "value", "key_cache", "value_cache")
    tensors: dict[str, Any] = {name: torch.ones(1, 2, 3, 4) for name in names}
    options = {"past": 0, "scale": 1.0, "mask": None, "alibi": None, "window": 0, "causal": True}
    return {**tensors, **options, **changes}


def _linear(rows: int, columns: int) -> dict[str, Any]:
    weight, scales = quantize_weight(torch.ones(rows, columns), columns)
    arguments = {"input": torch.ones(2, columns), "weight": weight, "bias": None, "scales": scales}
    return {**arguments, "residual": None, "activation": "identity", "gated": False}


def _packed(outputs: int, inputs: int) -> dict[str, Any]:
    nothing = torch.zeros(0, dtype=torch.uint8)
    return {
        "input": torch.ones(2, inputs),
        "weight_2bit": nothing,
        "weight_4bit": nothing,
        "scales": torch.ones(outputs),
    }


def _of_no_elements() -> Tensor:
    """What arithmetic gives for an empty tensor has strides of 0."""
    return torch.as_strided(torch.empty(0), (2, 1, 0, 1), (0, 0, 1, 0))


def _spoilt(value: float) -> Tensor:
    scores = torch.ones(1, 1, 4, 40)
    scores[0, 0, 2, 38] = value
    return scores


_SOFTMAX = {"mask": None, "alibi": None, "scale": 1.0, "causal": True, "window": 3}
_SWIZZLE = {"x": torch.ones(64), "groups": 4, "bits": 4, "symmetric": True, "pipeline": 4}

AGREE: dict[str, tuple[str, dict[str, Any]]] = {
    "six bits, no outputs": ("fp6_linear", _packed(0, 8)),
    "six bits, no inputs": ("fp6_linear", _packed(4, 0)),
    "int8, no outputs": ("linear", _linear(0, 16)),
    "a scale of minus zero": (
        "dequantize_range",
        {
            "levels": torch.tensor([[3, 9]], dtype=torch.uint8),
            "scale": torch.tensor([[-0.0]]),
            "minimum": torch.zeros(1, 1),
            "group_size": 2,
            "bits": 8,
        },
    ),
    "tokens of a sequence without end": (
        "token_sort_",
        {"indices": torch.tensor([[INT32_MAX, 5, 0, 5, 1, INT32_MAX - 1]], dtype=torch.int32), "seq_len": 2**63 - 1},
    ),
    "a NaN within the window": ("softmax", {"scores": _spoilt(torch.nan), **_SOFTMAX}),
    "an infinity within the window": ("softmax_", {"scores": _spoilt(torch.inf), **_SOFTMAX}),
    "no elements, strides of 0": (
        "bias_activation_",
        {"input": _of_no_elements(), "bias": None, "activation": "relu"},
    ),
}

REJECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "more devices than an integer holds": ("swizzle_quantize", {**_SWIZZLE, "nodes": 2**62, "devices_per_node": 4}),
    "a mask on another device": ("cached_attention", _attention(mask=torch.ones(1, 3, device="meta"))),
    "slopes on another device": ("cached_attention", _attention(alibi=torch.ones(2, device="meta"))),
}


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
