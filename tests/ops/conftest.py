"""The native kernels of this process, compiled once into a cache of their own."""

from __future__ import annotations

import pytest

from ds_plugin_sdk.conformance.op_info.optimizer_formulas import OPTIMIZER_OPS, OptimizerOp


@pytest.fixture(scope="session", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Native kernels of every family; without a compiler the tests that need them must fail, not fall back."""
    from ds_plugin_sdk.op_builder import load_kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_PLUGIN_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.setenv("DS_PLUGIN_FALLBACK", "0")
        for family in sorted({op.family for op in OPTIMIZER_OPS}):
            load_kernels(family, "cpu")


@pytest.fixture(params=OPTIMIZER_OPS, ids=lambda op: op.name)
def op(request: pytest.FixtureRequest) -> OptimizerOp:
    """Each optimizer op in turn."""
    return request.param


@pytest.fixture(params=["kernel", "reference"])
def implementation(request: pytest.FixtureRequest) -> str:
    """The native kernel and the reference in turn: both have to pass."""
    return request.param
