"""What optimizer ops do with layouts, and with arguments that do not fit: raise and modify nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.optimizers import OPS, OptimizerInfo, random_lists
from ds_plugin_sdk.errors import InvalidTensorError

FLOAT32 = (torch.float32,) * 3
Lists = list[list[Tensor]]


def call(op: OptimizerInfo, implementation: str, lists: Lists, **options: object) -> None:
    function = op.function if implementation == "kernel" else op.run_reference
    function(*lists, **{**op.variants[-1], **options})


# ---- layouts ---------------------------------------------------------------------------------------------------------


def transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def with_gaps(tensor: Tensor) -> Tensor:
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 7.0, dtype=tensor.dtype)
    view = wide[..., ::2]
    view.copy_(tensor)
    return view


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


LAYOUTS = [transposed, with_gaps, channels_last]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("which", ["params", "grads", "the last state", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_layouts_do_not_change_the_result(
    op: OptimizerInfo, layout: Callable[[Tensor], Tensor], which: str, dtype: torch.dtype, implementation: str
) -> None:
    if op.name == "adam_rollback_" and dtype != torch.float32:
        return
    expected = random_lists(op.lists, [(3, 4, 5, 6), (11,)], (dtype,) * 3)
    chosen = {"params": [0], "grads": [1], "the last state": [-1], "all": range(len(op.lists))}[which]
    lists = [[tensor.clone() for tensor in tensors] for tensors in expected]
    for i in chosen:
        lists[i][0] = layout(lists[i][0])
    strides = [tensors[0].stride() for tensors in lists]
    call(op, implementation, expected)
    call(op, implementation, lists)
    for left, right in zip(lists, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    assert [tensors[0].stride() for tensors in lists] == strides


def test_gaps_are_not_written(implementation: str) -> None:
    op = OPS[0]
    lists = random_lists(op.lists, [(4, 6)], FLOAT32)
    lists[0][0] = with_gaps(lists[0][0])
    call(op, implementation, lists)
    whole = lists[0][0].as_strided((4, 12), (12, 1))
    assert (whole[:, 1::2] == 7).all()


def test_interleaved_views_do_not_share_elements(op: OptimizerInfo, implementation: str) -> None:
    lists = random_lists(op.lists, [(8, 5), (8, 5)], FLOAT32)
    expected = [[tensor.clone() for tensor in tensors] for tensors in lists]
    base = torch.cat(lists[0], dim=1)
    lists[0] = [base[:, :5], base[:, 5:]]
    call(op, implementation, expected)
    call(op, implementation, lists)
    assert torch.equal(base, torch.cat(expected[0], dim=1))


def test_an_expanded_gradient_is_read(op: OptimizerInfo, implementation: str) -> None:
    lists = random_lists(op.lists, [(6, 5)], FLOAT32)
    expected = [[tensor.clone() for tensor in tensors] for tensors in lists]
    lists[1][0] = lists[1][0][:1].expand(6, 5)
    expected[1][0] = lists[1][0].clone()
    call(op, implementation, lists)
    call(op, implementation, expected)
    assert torch.equal(lists[0][0], expected[0][0])


def test_one_gradient_may_serve_two_parameters(op: OptimizerInfo, implementation: str) -> None:
    lists = random_lists(op.lists, [(40,), (40,)], FLOAT32)
    lists[1][1] = lists[1][0]
    call(op, implementation, lists)


def test_neighbours_in_one_buffer(op: OptimizerInfo, implementation: str) -> None:
    """DeepSpeed's flat buffers: each tensor begins where another ends, and none at an aligned address."""
    lists = random_lists(op.lists, [(7,), (130,), (1,)], FLOAT32)
    expected = [[tensor.clone() for tensor in tensors] for tensors in lists]
    flat = torch.cat([torch.zeros(1), *(tensor for tensors in lists for tensor in tensors)])
    views = list(flat[1:].split([7, 130, 1] * len(lists)))
    lists = [views[3 * i : 3 * i + 3] for i in range(len(lists))]
    call(op, implementation, expected)
    call(op, implementation, lists)
    for left, right in zip(lists, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_empty_lists_and_empty_tensors(op: OptimizerInfo, implementation: str) -> None:
    call(op, implementation, [[] for _ in op.lists])
    call(op, implementation, random_lists(op.lists, [(0,), (3, 0)], FLOAT32))


# ---- errors ----------------------------------------------------------------------------------------------------------


def drop_a_gradient(lists: Lists) -> None:
    lists[1].pop()


def another_shape(lists: Lists) -> None:
    lists[1][1] = torch.zeros(12)


def same_size_of_another_shape(lists: Lists) -> None:
    lists[2][1] = lists[2][1].reshape(5, 3)


def another_dtype_within_a_list(lists: Lists) -> None:
    lists[0][1] = lists[0][1].bfloat16()


def gradients_of_a_foreign_dtype(lists: Lists) -> None:
    lists[1][:] = [tensor.bfloat16() for tensor in lists[1]]


def states_of_a_foreign_dtype(lists: Lists) -> None:
    lists[2][:] = [tensor.half() for tensor in lists[2]]


def whole_numbers(lists: Lists) -> None:
    for tensors in lists:
        tensors[:] = [tensor.int() for tensor in tensors]


def another_device(lists: Lists) -> None:
    lists[1][1] = lists[1][1].to("meta")


def an_expanded_parameter(lists: Lists) -> None:
    lists[0][1] = lists[0][1][:1].expand(3, 5)


def one_parameter_twice(lists: Lists) -> None:
    for tensors in lists:
        tensors.append(tensors[0] if tensors is lists[0] else torch.zeros_like(tensors[0]))


def a_state_that_is_the_parameter(lists: Lists) -> None:
    lists[2][0] = lists[0][0]


def a_gradient_inside_the_parameter(lists: Lists) -> None:
    buffer = torch.zeros(60)
    lists[0][0], lists[1][0] = buffer[:40], buffer[20:]


def a_sparse_gradient(lists: Lists) -> None:
    lists[1][1] = lists[1][1].to_sparse()


REJECTED = {
    drop_a_gradient: r"grads has 2 tensors .*expected 3, as many as params",
    another_shape: r"grads\[1\] has shape \[12\] .*expected \[3, 5\], that of params\[1\]",
    same_size_of_another_shape: r"\w+\[1\] has shape \[5, 3\] .*expected \[3, 5\]",
    another_dtype_within_a_list: r"params\[1\] has another dtype than params\[0\] .*expected float32",
    gradients_of_a_foreign_dtype: r"grads are bfloat16 .*expected float32, as params",
    states_of_a_foreign_dtype: r"(exp_avgs|state_sums) are float16 .*expected float32, as params",
    whole_numbers: r"params has a dtype that .* does not handle|params has a dtype that no kernel handles",
    another_device: r"grads\[1\] is on another device than params\[0\] .*expected all tensors on one",
    an_expanded_parameter: r"params\[1\] has elements that share memory .*expected one element at each index",
    one_parameter_twice: r"params\[0\] and params\[3\] share memory",
    a_state_that_is_the_parameter: r"params\[0\] and (exp_avgs|state_sums)\[0\] share memory",
    a_gradient_inside_the_parameter: r"params\[0\] and grads\[0\] share memory",
    a_sparse_gradient: r"grads\[1\] is not strided .*expected a dense tensor",
}


@pytest.mark.parametrize(("spoil", "message"), REJECTED.items(), ids=[f.__name__ for f in REJECTED])
def test_what_does_not_fit_is_rejected_and_nothing_modified(
    op: OptimizerInfo, spoil: Callable[[Lists], None], message: str, implementation: str
) -> None:
    lists = random_lists(op.lists, [(40,), (3, 5), (9,)], FLOAT32)
    spoil(lists)
    before = [[tensor.clone() for tensor in tensors] for tensors in lists]
    versions = [tensor._version for tensors in lists for tensor in tensors]
    with pytest.raises(InvalidTensorError, match=message) as caught:
        call(op, implementation, lists)
    assert f"op '{op.name}'" in str(caught.value)
    for left, right in zip(lists, before, strict=True):
        for a, b in zip(left, right, strict=True):
            assert a.device.type == "meta" or torch.equal(a.to_dense(), b.to_dense())
    assert versions == [tensor._version for tensors in lists for tensor in tensors]


@pytest.mark.parametrize("name", ["adam_", "adam_rollback_"])
@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "steps has 0 entries .*expected 1, or one per tensor"),
        ([1, 2], "steps has 2 entries .*expected 1, or one per tensor"),
        (0, "steps has an entry 0 .*expected at least 1"),
        ([1, 2, -3], "steps has an entry -3 .*expected at least 1"),
    ],
    ids=str,
)
def test_step_numbers_are_checked(name: str, steps: object, message: str, implementation: str) -> None:
    op = next(op for op in OPS if op.name == name)
    lists = random_lists(op.lists, [(4,)] * 3, FLOAT32)
    before = lists[0][0].clone()
    with pytest.raises(InvalidTensorError, match=message):
        call(op, implementation, lists, steps=steps)
    assert torch.equal(lists[0][0], before)
