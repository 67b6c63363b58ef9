"""Ops that a plugin describes itself, checked as the SDK's are."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from ds_plugin_sdk import registry
from ds_plugin_sdk.conformance import op_info, suite
from ds_plugin_sdk.conformance.check import Case, ExcusedError, NonconformanceError
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import OpError


@pytest.fixture
def vendor_ops() -> ModuleType:
    """A vendor's module, which is importable within these tests alone."""
    return importlib.import_module("vendor_ops")


@pytest.fixture
def target(vendor_ops: ModuleType) -> Iterator[Target]:
    before = registry.get_accelerator()
    yield Target("vendor_ops:Right", vendor_ops.Right())
    registry.set_accelerator(before)


def cases(target: Target) -> list[Case]:
    """Every case of the vendor's op."""
    checks = [check for check in suite.checks() if check.level == "ops" and check.needs(target) is None]
    return [Case(check, each) for check in checks for each in check.cases(target) if each.get("op") == "scaled_relu"]


def test_a_vendors_op_has_the_checks_of_the_sdks(target: Target) -> None:
    names = {case.check.name for case in cases(target)}
    assert {"ops.accuracy", "ops.strided", "ops.guards", "ops.successive", "ops.rejects.shape", "ops.opcheck"} <= names


def test_a_right_kernel_passes_them_all(target: Target) -> None:
    for case in cases(target):
        try:
            case.run(target)
        except ExcusedError as excuse:
            assert excuse.verdict == "skipped", case.id


def test_a_wrong_kernel_is_found(target: Target, vendor_ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_ops, "_wrong", [True])
    accuracy = next(case for case in cases(target) if case.id == "ops.accuracy/scaled_relu/float32")
    with pytest.raises(NonconformanceError, match=r"scaled_relu on '1 columns' \(float32\): output 0"):
        accuracy.run(target)


def test_a_name_of_the_sdks_is_taken(vendor_ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_ops, "OPS", [op_info.find("rms_norm")])
    with pytest.raises(OpError, match="a name of its own"):
        op_info.described_in.__wrapped__("vendor_ops")


def test_a_module_without_descriptions_is_an_error() -> None:
    with pytest.raises(OpError, match="a list of OpInfo"):
        op_info.described_in("json")
