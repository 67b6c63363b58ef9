"""Kernels and references against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.bench import accuracy
from ds_plugin_sdk.conformance.op_info.optimizers import (
    DTYPES,
    OPS,
    Dtypes,
    OptimizerInfo,
    random_lists,
)

FLOAT32: Dtypes = (torch.float32,) * 3
SIZES = [(0,), (), (1,), (3,), (15,), (16,), (17,), (63,), (64,), (65,)]


def call(op: OptimizerInfo, implementation: str, lists: list[list[Tensor]], **options: object) -> None:
    function = op.function if implementation == "kernel" else op.run_reference
    function(*lists, **options)


def copies(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x).removeprefix("torch.") for x in d))
def test_errors_are_those_of_rounding(op: OptimizerInfo, dtypes: Dtypes, implementation: str) -> None:
    if dtypes[0] not in op.dtypes:
        with pytest.raises(ValueError, match="expected float32"):
            call(op, implementation, random_lists(op.lists, [(3,)], dtypes), **op.variants[0])
        return
    row = accuracy.measure(op, dtypes, implementation)
    rounded = 0.51  # the sum in float32 adds little to the rounding of the result to 16 bits
    undone = op.name == "adam_rollback_"  # divides by beta, which adds an error of its own
    assert row.params_ulp <= (rounded if dtypes[0] != torch.float32 else 1.5 if undone else 0.75)
    assert row.states_ulp <= (rounded if dtypes[2] != torch.float32 else 2.5)


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_sizes_around_vectors(op: OptimizerInfo, shape: tuple[int, ...], implementation: str) -> None:
    lists = random_lists(op.lists, [shape], FLOAT32)
    expected = op.update(*(tensors[0].double() for tensors in lists), op.variants[-1])
    call(op, implementation, lists, **op.variants[-1])
    for name, want in zip(op.written, expected, strict=True):
        torch.testing.assert_close(lists[op.lists.index(name)][0], want.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[1], DTYPES[-1]], ids=["float32", "bfloat16", "float16"])
def test_threads_and_neighbours_do_not_change_a_result(op: OptimizerInfo, dtypes: Dtypes) -> None:
    """Threads share a large tensor in a list of uneven sizes; alone, on one thread, it gets the same bits."""
    if dtypes[0] not in op.dtypes:
        return
    together = random_lists(op.lists, [(5,), (1_000_003,), (0,), (1025,), (30_000,)], dtypes)
    alone = copies(together)
    op.function(*together, **op.variants[-1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for i in range(5):
            op.function(*([tensors[i]] for tensors in alone), **op.variants[-1])
    finally:
        torch.set_num_threads(threads)
    for left, right in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_large_tensor_follows_the_formula(op: OptimizerInfo) -> None:
    lists = random_lists(op.lists, [(1_000_003,)], FLOAT32)
    expected = op.update(*(tensors[0].double() for tensors in lists), op.variants[-1])
    op.function(*lists, **op.variants[-1])
    for name, want in zip(op.written, expected, strict=True):
        torch.testing.assert_close(lists[op.lists.index(name)][0], want.float(), rtol=1e-6, atol=1e-6)


def test_gradients_are_not_modified(op: OptimizerInfo, implementation: str) -> None:
    lists = random_lists(op.lists, [(1003,), (64,)], FLOAT32)
    before = [grad.clone() for grad in lists[1]]
    call(op, implementation, lists, **op.variants[-1])
    assert all(torch.equal(a, b) for a, b in zip(lists[1], before, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, -0.0], ids=str)
@pytest.mark.parametrize("place", range(4))
def test_special_values_spread_as_the_formula_says(
    op: OptimizerInfo, value: float, place: int, implementation: str
) -> None:
    if place >= len(op.lists):
        return
    for options in op.variants:
        lists = random_lists(op.lists, [(37,)], FLOAT32)
        lists[place][0][5] = lists[place][0][36] = value  # in a whole vector and in the last, partial one
        if op.name == "adam_rollback_" and op.lists[place] == "exp_avg_sqs" and value < 0:
            continue  # no step leaves a negative sum of squares
        expected = op.update(*(tensors[0].double() for tensors in lists), options)
        call(op, implementation, lists, **options)
        for name, want in zip(op.written, expected, strict=True):
            actual = lists[op.lists.index(name)][0]
            torch.testing.assert_close(actual, want.float(), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_an_infinite_parameter_stays_without_decay(implementation: str) -> None:
    """A decay of 0 is not a term of 0 times infinity."""
    for op in OPS:
        lists = random_lists(op.lists, [(20,)], FLOAT32)
        lists[0][0][7] = float("inf")
        options = dict(next(o for o in op.variants if o["weight_decay"] == 0))
        call(op, implementation, lists, **options)
        assert lists[0][0][7] == (0 if op.name == "adam_rollback_" else float("inf"))


def test_overflow_to_infinity_in_float16(implementation: str) -> None:
    op = OPS[0]
    lists = random_lists(op.lists, [(40,)], (torch.float16,) * 3)
    lists[1][0][:] = 60_000.0
    call(op, implementation, lists, **op.variants[0])
    assert lists[3][0].isinf().all()  # (1 - 0.999) * 60000^2 is beyond float16


def test_a_zero_gradient_leaves_lion_s_parameters(implementation: str) -> None:
    op = OPS[3]
    for zero in (0.0, -0.0):
        lists = random_lists(op.lists, [(33,)], FLOAT32)
        lists[1][0][:] = lists[2][0][:] = zero
        before = lists[0][0].clone()
        call(op, implementation, lists, **op.variants[0])
        assert torch.equal(lists[0][0], before)


def test_adam_steps_of_each_parameter(implementation: str) -> None:
    op = OPS[0]
    steps = [1, 7, 7, 100_000]
    together = random_lists(op.lists, [(50,)] * 4, FLOAT32)
    alone = copies(together)
    options = dict(op.variants[0])
    call(op, implementation, together, **{**options, "steps": steps})
    for i, step in enumerate(steps):
        call(op, implementation, [[tensors[i]] for tensors in alone], **{**options, "steps": step})
        expected = alone[0][i]
        torch.testing.assert_close(together[0][i], expected, rtol=0, atol=0)
        assert step == 1 or not torch.equal(together[0][i], together[0][0])


def test_rollback_undoes_a_step(implementation: str) -> None:
    step, undo = OPS[0], OPS[1]
    options = {"steps": 5, "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    lists = random_lists(step.lists, [(1000,), (17,)], FLOAT32)
    before = copies(lists)
    call(step, implementation, lists, **options, adamw=True, bias_correction=True)
    assert not torch.allclose(lists[0][0], before[0][0], rtol=1e-4)
    call(undo, implementation, lists, **options)
    for left, right in zip(lists, before, strict=True):
        for a, b in zip(left, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_rollback_of_the_first_step_leaves_no_negative_second_moment(implementation: str) -> None:
    """Rounding would leave some just below 0, and the next step their square roots: NaN."""
    step, undo = OPS[0], OPS[1]
    options = {"steps": 1, "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    lists = random_lists(step.lists, [(1000,)], FLOAT32)
    lists[2][0].zero_()
    lists[3][0].zero_()
    call(step, implementation, lists, **options, adamw=True, bias_correction=True)
    call(undo, implementation, lists, **options)
    assert (lists[3][0] >= 0).all()


def test_float64_is_computed_in_float64(op: OptimizerInfo) -> None:
    lists = random_lists(op.lists, [(100,)], FLOAT32)
    if op.name == "adam_rollback_":
        return
    double = [[tensor.double() for tensor in tensors] for tensors in lists]
    expected = op.update(*(tensors[0].clone() for tensors in double), op.variants[-1])
    op.function(*double, **op.variants[-1])
    for name, want in zip(op.written, expected, strict=True):
        torch.testing.assert_close(double[op.lists.index(name)][0], want, rtol=1e-14, atol=1e-15)
