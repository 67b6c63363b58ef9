"""The native kernels of this process, compiled once into a cache of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ds_plugin_sdk.conformance.op_info.optimizers import OPS, OptimizerInfo


@pytest.fixture(scope="session", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    """Native kernels of every family; without a compiler the tests that need them must fail, not fall back."""
    native(*sorted({op.family for op in OPS}))


@pytest.fixture(params=OPS, ids=lambda op: op.name)
def op(request: pytest.FixtureRequest) -> OptimizerInfo:
    """Each optimizer op in turn."""
    return request.param


@pytest.fixture(params=["kernel", "reference"])
def implementation(request: pytest.FixtureRequest) -> str:
    """The native kernel and the reference in turn: both have to pass."""
    return request.param
