"""The names of builders: the page has them all, and a wrong one is never passed over."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from broken_plugin import install_broken
from ds_plugin_sdk import op_builder
from ds_plugin_sdk.conformance.check import NonconformanceError
from ds_plugin_sdk.conformance.ops import every_op
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.op_builder import op_table
from plugin_site import Install

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing-a-plugin.md"


def test_the_page_has_every_builder_with_its_name_and_family() -> None:
    rows = re.findall(r"^\| `(\w+Builder)` \| `(\w+)` \| `(\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    # Ops on host memory are the SDK's on every device.
    of_devices = [op for op in op_table.OPS if op.family and not (op.host or op.torch)]
    assert rows == [(op.builder, op.name, op.family) for op in of_devices]


WRONG = """
class NormBuilder(Fine):
    NAME = "norms"

class FusedLambBuilder(Fine):
    NAME = "fused_adam"

class SoftmaxBuilder(Fine):
    pass

class QuantizerOpBuilder(Fine):
    NAME = "quantizer"

class ZapNormBuilder(Fine):  # found by its NAME, as DeepSpeed asks for no norm
    NAME = "norm"

class LionBuilder(Fine):  # beside FusedLionBuilder
    NAME = "fused_lion"

class ScaledReluBuilder(Fine):  # which the plugin's own code loads
    NAME = "scaled_relu"
    OWN = True
"""


def test_a_wrong_name_is_warned_of_with_the_right_ones(install: Install) -> None:
    package = install_broken(install, more=WRONG)
    with pytest.warns(RuntimeWarning) as caught:
        op_builder.find("FusedAdamBuilder", package, "cpu")
    lamb, norm, quantizer, softmax = sorted(str(warning.message) for warning in caught)
    assert f"{package}.FusedLambBuilder: NAME is 'fused_adam', and the op of FusedLambBuilder is 'fused_lamb'" in lamb
    assert f"{package}.NormBuilder: NAME is 'norms', which is no op's, so nobody asks for its kernels: one of" in norm
    assert "NAME is 'quantizer', and DeepSpeed asks for that op by the class name QuantizerBuilder" in quantizer
    assert "SoftmaxBuilder: it has no NAME, so it is taken for a base class; the op's is 'softmax'" in softmax
    problems = op_builder.problems_in(package)
    assert [name for name in sorted(problems) if problems[name]] == [
        "FusedLambBuilder",
        "NormBuilder",
        "QuantizerOpBuilder",
        "SoftmaxBuilder",
    ]
    assert problems["FusedLionBuilder"] is None
    assert problems["ScaledReluBuilder"] is None
    assert "Fine" not in problems
    assert all(name in norm for name in ("norm,", "softmax", "fused_adam"))


def test_a_module_that_cannot_be_imported_is_no_conformance(install: Install) -> None:
    package = install_broken(install)
    folder = Path(str(importlib.import_module(package).__file__)).parent
    (folder / "softmax.py").write_text("import zap_compiler\n", encoding="utf-8")
    target = Target("zap", importlib.import_module(package.replace("builders", "accelerator")).ZAP_Accelerator())
    with pytest.warns(RuntimeWarning, match=f"the builders in {package}.softmax are skipped"):
        cases = list(every_op._own_builders(target))
    assert {"builder": f"{package}.softmax"} in cases
    with pytest.raises(NonconformanceError, match="softmax: ModuleNotFoundError: No module named 'zap_compiler'"):
        every_op.builder_name(target, f"{package}.softmax")


@pytest.fixture
def target(install: Install) -> Target:
    accelerator = install_broken(install).replace("builders", "accelerator")
    return Target("zap", importlib.import_module(accelerator).ZAP_Accelerator())


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore:ds-plugin-sdk. op 'lion' falls back:RuntimeWarning")  # wanted
def test_a_kernel_that_does_not_compile_is_no_conformance(target: Target) -> None:
    cases = list(every_op._native_ops(target))
    assert {"builder": "FusedLionBuilder", "op": "lion_"} in cases
    assert {"builder": "FusedAdamBuilder", "op": "adam_rollback_"} in cases, "each op of a family"
    with pytest.raises(NonconformanceError, match="the reference implementation is used") as error:
        every_op.native(target, "FusedLionBuilder", "lion_")
    assert "this kernel is not finished" in error.value.why


@pytest.mark.compiler
def test_an_op_of_a_family_without_a_kernel_is_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of ``fused_adagrad`` loads and registers nothing."""
    # In this process the SDK's own kernels may be registered for the CPU.
    monkeypatch.setattr(every_op, "dispatch_key", lambda device_type: "PrivateUse1")
    with pytest.raises(NonconformanceError, match="adagrad_ has no kernel for PrivateUse1"):
        every_op.native(target, "FusedAdagradBuilder", "adagrad_")
