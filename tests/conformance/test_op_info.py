"""The descriptions of ops are complete, and in the order that the checks rely on."""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.op_info import Make, OpInfo
from ds_plugin_sdk.ops import _library

OPS = pytest.mark.parametrize("op", op_info.infos(), ids=lambda op: op.name)


def test_every_op_is_described() -> None:
    """Ops of all families: none is defined that the suite does not try."""
    op_info.infos()
    collectives = ("all_reduce", "all_gather", "reduce_scatter")
    by_processes = {name + end for name in collectives for end in ("_", "_in_group_")}  # tests/test_comm.py
    assert {op.name for op in op_info.infos()} == _library._defined - by_processes


def test_quantized_weights_have_their_own_tolerance() -> None:
    linear, scales = op_info.find("linear"), torch.ones(2, 1)
    assert linear.allowed({"scales": None}, torch.float32) == (1e-5, 1e-5)
    assert linear.allowed({"scales": scales}, torch.float32) == (2**-10, 2**-10)
    assert linear.allowed({"scales": scales}, torch.bfloat16) == linear.allowed({}, torch.bfloat16) == (2**-6, 2**-5)
    assert linear.allowed({}, torch.int8) == (0.0, 0.0)


@OPS
def test_samples_come_empty_first_and_real_last(op: OpInfo) -> None:
    for dtype in op.dtypes:
        kinds = [sample.kind for sample in op.samples(Make.seeded(dtype))]
        order = [
            kind
            for kind, _ in itertools.groupby({"random": "middle", "adversarial": "middle"}.get(k, k) for k in kinds)
        ]
        assert order == ["empty", "middle", "real"]


@OPS
def test_every_op_is_tried_beyond_a_launch(op: OpInfo) -> None:
    """Rows, columns or tensors: some size of each op's is larger than a grid, a block or a launch's arguments."""
    tensors = [
        [
            t
            for v in sample.arguments.values()
            for t in (v if isinstance(v, list) else [v])
            if isinstance(t, torch.Tensor)
        ]
        for sample in op.large(Make.seeded(op.dtypes[0]))
    ]
    assert any(len(each) > 500 or max(size for t in each for size in (*t.shape, 0)) > 1024 for each in tensors)


@OPS
def test_labels_are_unique(op: OpInfo) -> None:
    made = [*op.samples(Make.seeded(op.dtypes[0])), *op.large(Make.seeded(op.dtypes[0]))]
    labels = [sample.label for sample in made]
    assert len(labels) == len(set(labels))


@OPS
def test_the_formula_leaves_its_arguments_alone(op: OpInfo) -> None:
    sample = next(s for s in op.samples(Make.seeded(torch.float32)) if s.kind != "empty")
    flat = [
        t for v in sample.arguments.values() for t in (v if isinstance(v, list) else [v]) if isinstance(t, torch.Tensor)
    ]
    before = [t.clone() for t in flat]
    op.formula(**sample.arguments)
    assert all(torch.equal(a, b) for a, b in zip(flat, before, strict=True))


def test_what_is_close_is_close() -> None:
    one = torch.ones(3, dtype=torch.float64)
    assert op_info.close_to(one.float(), one, rtol=1e-6, atol=0) is None
    assert op_info.close_to(one.float() + 1e-5, one, rtol=1e-6, atol=0) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_must_be_met_exactly(value: float) -> None:
    spoilt = torch.tensor([1.0, value], dtype=torch.float64)
    assert op_info.close_to(spoilt.float(), spoilt, rtol=1e-6, atol=0) is None
    wrong = op_info.close_to(torch.ones(2), spoilt, rtol=1e-6, atol=0)
    assert wrong == (float("inf"), (1,))


def test_an_error_is_relative_to_what_was_replaced() -> None:
    """1 - 0.999 has the error of 1, not that of 0.001."""
    new, old = torch.tensor([1e-3], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    assert op_info.close_to(new + 1e-7, new, before=old, rtol=1e-6, atol=0) is None
    assert op_info.close_to(new + 1e-7, new, rtol=1e-6, atol=0) is not None
