"""Ops as functions of the CPU kernels' libraries: the ops' own kernels, and no others."""

from __future__ import annotations

import ctypes
import warnings

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.ops import _op_functions, decoder_layer
from ds_plugin_sdk.ops._op_functions import _OPS, OpFunctions

pytestmark = pytest.mark.compiler


@pytest.fixture(autouse=True)
def libraries(native) -> None:  # type: ignore[no-untyped-def]  # the fixture of tests/conftest.py
    native("linear", "attention", "norm", "rotary", "decoder_layer", "transformer", "residual")


def found(functions: OpFunctions) -> set[str]:
    address = functions.address()
    values = (ctypes.c_void_p * len(_OPS)).from_address(address) if address else [None] * len(_OPS)
    return {op for op, value in zip(_OPS, values, strict=True) if value}


def new_functions() -> OpFunctions:
    assert decoder_layer._functions is not None
    return OpFunctions(decoder_layer._functions._headers)


def test_all_ops_have_one() -> None:
    assert found(new_functions()) == set(_OPS)


def test_who_was_compiled_with_other_headers_of_torch_gets_none() -> None:
    assert found(OpFunctions(b"1.0.0")) == set()


def test_a_kernel_that_was_registered_later_serves() -> None:
    functions = new_functions()
    before = list(_op_functions._found)
    assert "rms_norm" in found(functions)

    def theirs(input: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
        return torch.zeros_like(input)

    try:
        with torch.library._scoped_library("ds_plugin", "IMPL") as library:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of a kernel in place of another
                library.impl("rms_norm", theirs, "CPU")
            assert found(functions) == set(_OPS) - {"rms_norm"}
    finally:  # those that were found count as before
        _op_functions._found[:] = [
            each._replace(kernels=_op_functions.KernelWatch([_OPS[each.place]])) for each in before
        ]
        decoder_layer._functions = new_functions()


def test_modes_profilers_and_transforms_look_for_ops() -> None:
    functions = new_functions()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert functions.address() == 0
    seen = []
    torch.func.vmap(lambda x: seen.append(functions.address()) or x)(torch.ones(2))
    assert seen == [0]
    assert functions.address() != 0
