"""How the ops live in torch: schema, tracing, autograd, and the order in which kernels arrive."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch

from ds_plugin_sdk.conformance.op_info.optimizers import OPS, OptimizerInfo, random_lists
from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.settings import child_environment

FLOAT32 = (torch.float32,) * 3
SHAPES = [(7,), (3, 5), (0,)]


def test_opcheck(op: OptimizerInfo) -> None:
    overload = getattr(torch.ops.ds_plugin, op.name).default
    for options in op.variants[-2:]:
        torch.library.opcheck(overload, (*random_lists(op.lists, SHAPES, FLOAT32), *op.numbers(options)))


def test_compiled_function_updates_its_arguments(op: OptimizerInfo) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(*lists: list[torch.Tensor]) -> torch.Tensor:
        op.function(*lists, **op.variants[-1])
        return lists[0][0] * 2

    lists, expected = random_lists(op.lists, SHAPES, FLOAT32), random_lists(op.lists, SHAPES, FLOAT32)
    doubled = step(*lists)
    op.function(*expected, **op.variants[-1])
    for left, right in zip(lists, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    assert torch.equal(doubled, expected[0][0] * 2)


def test_parameters_that_need_gradients_are_updated_outside_no_grad(op: OptimizerInfo) -> None:
    lists, expected = random_lists(op.lists, SHAPES, FLOAT32), random_lists(op.lists, SHAPES, FLOAT32)
    lists[0] = [torch.nn.Parameter(tensor) for tensor in lists[0]]
    op.function(*lists, **op.variants[-1])
    op.function(*expected, **op.variants[-1])
    assert all(torch.equal(a, b) for a, b in zip(lists[0], expected[0], strict=True))
    assert all(param.grad_fn is None and param.is_leaf for param in lists[0])


def test_a_strided_parameter_that_needs_gradients(op: OptimizerInfo) -> None:
    """Its update goes through a copy, which autograd must not record."""
    lists, expected = random_lists(op.lists, [(4, 6)], FLOAT32), random_lists(op.lists, [(4, 6)], FLOAT32)
    lists[0] = [torch.nn.Parameter(lists[0][0].mT.contiguous().mT)]
    op.function(*lists, **op.variants[-1])
    op.function(*expected, **op.variants[-1])
    assert torch.equal(lists[0][0], expected[0][0])
    assert lists[0][0].is_leaf
    assert torch.is_grad_enabled()


def test_autograd_notices_a_parameter_that_changed_under_a_graph(op: OptimizerInfo) -> None:
    lists = random_lists(op.lists, [(7,)], FLOAT32)
    param = torch.nn.Parameter(lists[0][0])
    loss = (param * param).sum()
    op.function([param], *lists[1:], **op.variants[-1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors(op: OptimizerInfo) -> None:
    with torch.inference_mode():
        lists = random_lists(op.lists, [(7,)], FLOAT32)
        before = lists[0][0].clone()
        op.function(*lists, **op.variants[-1])
        assert not torch.equal(lists[0][0], before)


def test_module_may_be_imported_again(op: OptimizerInfo) -> None:
    importlib.reload(importlib.import_module(f"ds_plugin_sdk.ops.{op.family}"))
    op.function(*random_lists(op.lists, [(7,)], FLOAT32), **op.variants[-1])


def test_fake_tensors_are_checked(op: OptimizerInfo) -> None:
    lists = [[tensor.to("meta") for tensor in tensors] for tensors in random_lists(op.lists, [(7,)], FLOAT32)]
    op.function(*lists, **op.variants[-1])
    lists[1][0] = torch.zeros(8, device="meta")
    with pytest.raises(InvalidTensorError, match=r"grads\[0\] has shape \[8\]"):
        op.function(*lists, **op.variants[-1])


REFERENCE_FIRST = """
import torch
from ds_plugin_sdk.conformance.op_info.optimizers import OPS, random_lists
float32 = (torch.float32,) * 3
for op in OPS:
    lists, expected = (random_lists(op.lists, [(7,), (3, 5)], float32) for _ in range(2))
    op.function(*lists, **op.variants[-1])
    op.run_reference(*expected, **op.variants[-1])
    assert all(torch.equal(a, b) for l, e in zip(lists, expected) for a, b in zip(l, e)), op.name
    overload = getattr(torch.ops.ds_plugin, op.name).default
    torch.library.opcheck(overload, (*random_lists(op.lists, [(7,)], float32), *op.numbers(op.variants[-1])))
"""


def test_without_native_code_the_reference_serves() -> None:
    program = [sys.executable, "-W", "ignore", "-c", REFERENCE_FIRST]
    subprocess.run(program, env=child_environment(DS_PLUGIN_COMPILE="0"), check=True)


DEFINED = """
import importlib, sys
for family in sys.argv[1:]:
    importlib.import_module(f"ds_plugin_sdk.ops.{family}")
from ds_plugin_sdk.ops import _library
print(*_library._defined)
"""


def test_optimizer_ops_are_those_that_modules_define() -> None:
    """The tests above see every op of their families: none is defined that they do not run."""
    families = {op.family for op in OPS}
    done = subprocess.run([sys.executable, "-c", DEFINED, *families], check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) == {op.name for op in OPS}
