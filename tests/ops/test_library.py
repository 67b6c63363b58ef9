"""How ops are defined: what of a definition runs where, and what it says if it cannot be right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_first, check_written

ops = torch.ops.ds_plugin_test


@pytest.fixture(autouse=True)
def own_namespace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops of these tests live in a namespace of their own, and end with their test."""
    with torch.library._scoped_library("ds_plugin_test", "FRAGMENT") as library:
        monkeypatch.setattr(_library, "_libraries", {"ds_plugin_test": library})
        monkeypatch.setattr(_library, "_defined", set())
        yield


def _check(input: Tensor, factor: Tensor | None = None) -> None:
    check_first("input", input)
    if factor is not None and factor.shape != input.shape:
        raise CheckError("factor has another shape; expected that of input")


def test_the_arguments_go_to_those_that_name_them() -> None:
    @_library.op(
        "product(Tensor input, float by, Tensor factor, bool _) -> (Tensor, Tensor)",
        check=_check,
        outputs=lambda factor, input: (factor.new_empty(1), input.new_empty(2)),
    )
    def product_reference(input: Tensor, by: float, factor: Tensor, _: bool) -> tuple[Tensor, Tensor]:
        return input * factor * by, factor.clone()

    x, y = torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0])
    for product in (ops.product, product_reference):
        assert [tensor.tolist() for tensor in product(x, 10.0, y, True)] == [[100.0, 210.0], [5.0, 7.0]]
        with pytest.raises(InvalidTensorError, match=r"factor has another shape .*product.*: expected that of input"):
            product(x, 10.0, y[:1], True)
    with FakeTensorMode() as mode:
        first, second = ops.product(mode.from_tensor(x), 10.0, mode.from_tensor(y), True)
    assert (first.shape, second.shape) == ((1,), (2,))


def test_an_argument_that_an_op_does_not_have_is_the_default() -> None:
    _library.op("alone(Tensor input) -> Tensor", check=_check)(lambda input: input + 1)
    assert ops.alone(torch.zeros(1)).tolist() == [1.0]
    with pytest.raises(InvalidTensorError, match="input is int64"):
        ops.alone(torch.zeros(1, dtype=torch.int64))


def test_tracing_checks_but_does_not_compute() -> None:
    computed = []

    @_library.op("fill_(Tensor(a!) input) -> ()", check=_check)
    def fill_reference(input: Tensor) -> None:
        check_written("input", input)
        computed.append(input)
        input.fill_(1)

    with FakeTensorMode() as mode:
        assert ops.fill_(mode.from_tensor(torch.zeros(1).expand(4))) is None
        with pytest.raises(InvalidTensorError, match="input has no dimensions"):
            ops.fill_(mode.from_tensor(torch.tensor(0.0)))
    assert computed == []
    with pytest.raises(InvalidTensorError, match=r"share memory .*fill_"):
        ops.fill_(torch.zeros(1).expand(4))
    assert computed == []
    x = torch.zeros(4)
    torch.library.opcheck(ops.fill_.default, (x,))
    ops.fill_(x)
    assert x.tolist() == [1.0] * 4


def test_a_reference_implementation_records_nothing() -> None:
    @_library.op("double(Tensor input) -> Tensor", check=_check, outputs=lambda input: input.new_empty(input.shape))
    def double_reference(input: Tensor) -> Tensor:
        """Twice."""
        return input * 2

    assert not double_reference(torch.ones(1, requires_grad=True)).requires_grad
    assert (double_reference.__name__, double_reference.__doc__) == ("double_reference", "Twice.")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's opcheck asks for it
def test_an_op_with_a_derivative() -> None:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.by, None

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.by = inputs[1]

    _library.op(
        "times(Tensor input, float by) -> Tensor",
        check=_check,
        outputs=lambda input: input.new_empty(input.shape),
        autograd=_library.Autograd(backward, save),
    )(lambda input, by: input * by)
    x = torch.ones(3, requires_grad=True)
    ops.times(x, 4.0).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4.0] * 3
    torch.library.opcheck(ops.times.default, (x, 4.0))


def test_a_name_that_the_schema_does_not_have_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"_check has a parameter input, and wrong no such argument"):
        _library.op("wrong(Tensor x) -> Tensor", check=_check)(lambda x: x)
    with pytest.raises(TypeError, match="has a parameter y, and wrong no such argument"):
        _library.op("wrong(Tensor x) -> Tensor", check=lambda: None)(lambda y: y)


def test_defining_an_op_again_changes_nothing() -> None:
    for value in (1, 2):
        _library.op("constant(Tensor input) -> Tensor", check=_check)(lambda input, value=value: input + value)
    assert ops.constant(torch.zeros(1)).tolist() == [1.0]
