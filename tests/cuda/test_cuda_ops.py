"""The benchmark of the CUDA ops, as far as it goes without a GPU: every case is called, on tensors without data."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path

import cuda_ops
import deepspeed_cuda_ops
import pytest
import torch


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device for the GPU, with an L2 cache of 50 MB, and nothing compiled."""
    monkeypatch.setattr(cuda_ops, "DEVICE", "meta")
    monkeypatch.setattr(torch, "compile", lambda function: function)
    properties = types.SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize(
    "group",
    [cuda_ops.training_cases, cuda_ops.decode_cases, lambda: cuda_ops.quantizer_cases(None), cuda_ops.op_cases],
    ids=["training", "decode", "quantizer", "ops"],
)
def test_every_case_can_be_called(no_data: None, group: Callable[[], Iterator[cuda_ops.Case]]) -> None:
    count = 0
    for case in group():
        assert len({len(calls) for calls in case.calls.values()}) == 1, "all rotate among as many arguments"
        assert next(iter(case.calls)).startswith("ds_plugin"), "ours comes first"
        for calls in case.calls.values():
            calls[0]()
        count += 1
    assert count


def test_an_implementation_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(cuda_ops, "take_turns", lambda runs, turns: dict.fromkeys(runs, 2.0))
    case = cuda_ops.Case("c", 8_000_000, {"ours": [lambda: None], "theirs": [fails]}, in_graph=False)
    errors: dict[str, str] = {}
    (row,) = cuda_ops.rows_of(case, copy_rate=8.0, turns=1, errors=errors)
    assert (row.implementation, row.gigabytes_per_second, row.times_copy) == ("ours", 4.0, 0.5)
    assert errors == {"c, theirs": "ValueError: no such kernel"}


def test_ops_that_were_not_built_are_none(tmp_path: Path) -> None:
    assert deepspeed_cuda_ops.load("fused_adam", tmp_path) is None
