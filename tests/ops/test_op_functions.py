"""Ops as functions of the CPU kernels' libraries: the ops' own kernels, and no others."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from ds_plugin_sdk.ops import _op_functions, decoder_layer
from ds_plugin_sdk.ops._cpu_kernels import CPUKernels
from ds_plugin_sdk.ops._op_functions import _OPS, OpFunctions, _Function

pytestmark = pytest.mark.compiler


@pytest.fixture(autouse=True)
def libraries(native: Callable[..., None]) -> None:
    native("linear", "attention", "norm", "rotary", "decoder_layer", "transformer", "residual")


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> OpFunctions:
    """As if their libraries had been loaded just now."""
    assert decoder_layer._functions is not None
    again = {place: _Function(each.of, CPUKernels(_OPS[place])) for place, each in _op_functions._found.items()}
    monkeypatch.setattr(_op_functions, "_found", again)
    return OpFunctions(decoder_layer._functions._headers)


def found(functions: OpFunctions, look: bool = True) -> set[str]:
    address = functions.address(look)
    values = (ctypes.c_void_p * len(_OPS)).from_address(address) if address else [None] * len(_OPS)
    return {op for op, value in zip(_OPS, values, strict=True) if value}


@contextlib.contextmanager
def another_kernel(op: str, key: str) -> Iterator[None]:
    """One that somebody registers for an op; torch warns of a kernel in place of another."""
    with torch.library._scoped_library("ds_plugin", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a kernel in the place of another
        library.impl(op, lambda *args: torch.zeros_like(args[0]), key)
        yield


def test_all_ops_have_one(functions: OpFunctions) -> None:
    assert found(functions) == set(_OPS)


def test_who_was_compiled_with_other_headers_of_torch_gets_none(functions: OpFunctions) -> None:
    assert found(OpFunctions(b"1.0.0")) == set()


@pytest.mark.parametrize("key", ["CPU", "AutogradCPU", "ADInplaceOrView"])
def test_a_kernel_that_was_registered_later_serves(functions: OpFunctions, key: str) -> None:
    assert "rms_norm" in found(functions)
    with another_kernel("rms_norm", key):
        assert found(functions) == set(_OPS) - {"rms_norm"}


def test_a_kernel_that_takes_the_place_of_another_registration_is_seen(functions: OpFunctions) -> None:
    """There are as many registrations as before."""
    with another_kernel("softmax", "CPU"):
        assert "rms_norm" in found(functions)
    with another_kernel("rms_norm", "CPU"):
        assert "rms_norm" not in found(functions)


def test_without_looking_a_kernel_that_python_registers_is_seen(functions: OpFunctions) -> None:
    assert found(functions) == found(functions, look=False) == set(_OPS)
    with another_kernel("rms_norm", "CPU"):
        assert "rms_norm" not in found(functions, look=False)


def test_kernels_of_other_devices_do_not_count(functions: OpFunctions) -> None:
    with another_kernel("rms_norm", "XPU"):
        assert found(functions) == set(_OPS)


def test_a_library_that_was_loaded_later_serves(functions: OpFunctions) -> None:
    place = _OPS.index("rms_norm")
    with another_kernel("rms_norm", "CPU"):
        assert "rms_norm" not in found(functions)
        _op_functions._found[place] = _Function(_op_functions._found[place].of, CPUKernels("rms_norm"))
        assert "rms_norm" in found(functions)


def test_autocast_modes_profilers_and_transforms_look_for_ops(functions: OpFunctions) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert functions.address() == 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert functions.address() == 0
    seen = []
    torch.func.vmap(lambda x: seen.append(functions.address()) or x)(torch.ones(2))
    assert seen == [0]
    assert functions.address() != 0
