"""Who installs a plugin keeps the ops that DeepSpeed had: what was compatible before is compatible after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deepspeed_support import Python

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.errors import ToolchainError
from ds_plugin_sdk.jit import CudaToolchain
from ds_plugin_sdk.op_builder import lookup, op_table

# What DeepSpeed's own accelerators have builders for, and the names of those ops; from the releases themselves.
RELEASES: dict[str, dict[str, dict[str, str]]] = json.loads(
    (Path(__file__).parent / "builders.json").read_text(encoding="utf-8")
)

CUDA = str(Path(__file__).parents[3] / "plugins" / "cuda")

BOTH = """
import contextlib, importlib, json, sys
import deepspeed
from deepspeed.ops import op_builder as names

def says(builder):
    if builder is None or getattr(builder, "NAME", "deepspeed_not_implemented") == "deepspeed_not_implemented":
        return None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return bool(builder().is_compatible(verbose=False))
    except Exception:  # no CUDA toolkit
        return False

def both(device, ours):
    theirs = importlib.import_module(f"deepspeed.accelerator.{device}_accelerator")
    theirs = getattr(theirs, f"{device.upper()}_Accelerator")()
    return {
        name: (says(theirs.get_op_builder(name)), says(ours.get_op_builder(name)), ours.get_op_builder(name).__module__)
        for name in vars(names)
        if name.endswith("Builder") and name != "OpBuilder"
    }

from ds_plugin_cpu.accelerator import CPU_Accelerator
from ds_plugin_cuda.accelerator import CUDA_Accelerator
print(json.dumps({"cpu": both("cpu", CPU_Accelerator()), "cuda": both("cuda", CUDA_Accelerator())}))
"""


@pytest.mark.parametrize("release", RELEASES)
def test_every_builder_of_a_release_is_in_the_table(release: str) -> None:
    for device, builders in RELEASES[release].items():
        known = {op.builder: op.name for op in op_table.OPS if op.deepspeed}
        assert {name: known.get(name) for name in builders} == builders, device


def _has_nvcc() -> bool:
    try:
        return bool(CudaToolchain().find())
    except ToolchainError:
        return False


@pytest.mark.deepspeed
def test_what_was_compatible_is_compatible(python: Python) -> None:
    """By both devices' classes, ours and DeepSpeed's; it takes no GPU to ask."""
    table = json.loads(python(BOTH, PYTHONPATH=CUDA).stdout.splitlines()[-1])
    for device, builders in table.items():
        had = {name: before for name, (before, _, _) in builders.items() if before is not None}
        assert had.keys() == RELEASES["0.19.8"][device].keys()
        lost = [name for name, before in had.items() if before and not builders[name][1]]
        # With torch's build for CUDA, DeepSpeed says yes without nvcc too, and fails when it compiles.
        compiled = [name for name in lost if builders[name][2].startswith("ds_plugin_cuda.")]
        assert lost == ([] if device == "cpu" or _has_nvcc() else compiled)
        assert all(builders[name][1] is not None for name in had)
    own = {name for name, (_, _, module) in table["cuda"].items() if module.startswith("deepspeed.")}
    assert own >= {"GDSBuilder", "DeepCompileBuilder", "InferenceCutlassBuilder", "RaggedOpsBuilder"}
    assert "EvoformerAttnBuilder" not in own  # ours, which asks DeepSpeed's when it is loaded


@pytest.mark.deepspeed
def test_no_gpu_is_asked_while_classes_are_looked_up(python: Python) -> None:
    python(
        "import deepspeed, torch\n"
        "from deepspeed.ops.op_builder.builder import OpBuilder\n"
        "def asked(*_, **__):\n    raise SystemExit('asked')\n"
        "OpBuilder.is_compatible = asked\n"
        "torch.cuda._lazy_init = asked\n"
        "from ds_plugin_cuda.accelerator import CUDA_Accelerator\n"
        "for name in list(vars(deepspeed.ops.op_builder)):\n"
        "    name.endswith('Builder') and CUDA_Accelerator().get_op_builder(name)\n",
        PYTHONPATH=CUDA,
    )


@pytest.mark.deepspeed
def test_what_deepspeed_lends_is_of_the_device(python: Python) -> None:
    python(
        "import deepspeed\n"
        "from ds_plugin_sdk.integrations.deepspeed import deepspeed_builders as lent\n"
        "assert lent.find('GDSBuilder', 'zap') is None\n"
        "assert lent.find('FusedLambBuilder', 'npu').__module__ == 'deepspeed.ops.op_builder.npu.fused_lamb'\n"
    )


class Theirs:
    NAME = "fused_lamb"
    compatible = True

    def is_compatible(self, verbose: bool = False) -> bool:
        return self.compatible

    def load(self, verbose: bool = True) -> str:
        return "theirs"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> type[Theirs]:
    """A class of the test's own, so that nothing is loaded yet, lent for every op of a device."""
    cls = type("Theirs", (Theirs,), {})
    monkeypatch.setattr(lookup, "_sources", [lambda name, device: cls if device == "zap" else None])
    return cls


@pytest.mark.filterwarnings("ignore:.*the plugin has no native kernel")  # so it has none here
@pytest.mark.parametrize("compatible", [True, False])
def test_deepspeeds_own_op_comes_before_a_reference_where_it_is_compatible(
    theirs: type[Theirs], compatible: bool
) -> None:
    theirs.compatible = compatible
    builder = op_builder.find("FusedLambBuilder", None, "zap")()
    assert builder.NAME == "fused_lamb"
    assert builder.is_compatible()
    assert (builder.load() == "theirs") is compatible


@pytest.mark.filterwarnings("ignore:.*the plugin has no native kernel")  # so it has none here
def test_a_builder_that_cannot_say_whether_it_is_compatible_is_not(
    theirs: type[Theirs], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: object, verbose: bool = False) -> bool:
        raise OSError("no CUDA toolkit")

    monkeypatch.setattr(theirs, "is_compatible", missing)
    assert op_builder.find("FusedLambBuilder", None, "zap")().load() != "theirs"


def test_native_code_comes_before_deepspeeds_own(theirs: type[Theirs]) -> None:
    for name in ("CPUAdamBuilder", "UtilsBuilder"):
        assert op_builder.find(name, None, "zap").__module__.startswith("ds_plugin_sdk.")
        assert not issubclass(op_builder.find(name, None, "zap"), op_builder.LentOpBuilder)
    assert op_builder.find("GDSBuilder", None, "zap") is theirs


@pytest.mark.parametrize("compatible", [True, False])
def test_native_code_that_yields_is_used_where_deepspeeds_own_is_not_compatible(
    theirs: type[Theirs], compatible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs.compatible = compatible
    ours = op_builder.find("CPUAdamBuilder", None, "zap")
    monkeypatch.setattr(ours, "YIELDS", True)
    monkeypatch.setattr(ours, "load", lambda self, verbose=True: "ours")
    assert op_builder.find("CPUAdamBuilder", None, "zap")().load() == ("theirs" if compatible else "ours")


def test_the_kernels_of_a_family_are_never_deepspeeds(theirs: type[Theirs]) -> None:
    op_builder.use_package("zap", None)
    assert lookup._builder_of("lamb", None, "zap").__module__ == "ds_plugin_sdk.op_builder.sourceless"
