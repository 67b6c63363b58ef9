"""From DeepSpeed's builder names to builder classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.errors import OpNotImplementedError, SdkError
from ds_plugin_sdk.jit.plan import make_request
from ds_plugin_sdk.op_builder import (
    CppOpBuilder,
    NotImplementedBuilder,
    ReferenceOpBuilder,
    SYCLOpBuilder,
    lookup,
    op_table,
)
from ds_plugin_sdk.op_builder import builder as builder_module

BUILDERS = """
from ds_plugin_sdk import CppOpBuilder

class ZAPOpBuilder(CppOpBuilder):
    pass

class FusedAdamBuilder(ZAPOpBuilder):
    NAME = "fused_adam"

    def sources(self):
        return [self.kernel_path("csrc/adam.cpp")]

    def include_paths(self):
        return [self.kernel_include("csrc/include")]
"""


@pytest.fixture
def zap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A vendor's package with one builder and its kernel."""
    package = tmp_path / "zap_plugin"
    (package / "op_builder").mkdir(parents=True)
    (package / "csrc" / "include").mkdir(parents=True)
    (package / "csrc" / "adam.cpp").write_text("// kernel\n", encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "op_builder" / "__init__.py").write_text("", encoding="utf-8")
    (package / "op_builder" / "fused_adam.py").write_text(BUILDERS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    lookup._classes_in.cache_clear()
    for name in [name for name in sys.modules if name.startswith("zap_plugin")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("class_name", "name"),
    [
        ("CPUAdamBuilder", "cpu_adam"),
        ("FusedAdamBuilder", "fused_adam"),
        ("CPUAdagradBuilder", "cpu_adagrad"),
        ("FusedLionBuilder", "fused_lion"),
        ("FusedLambBuilder", "fused_lamb"),
        ("TransformerBuilder", "transformer"),
        ("StochasticTransformerBuilder", "stochastic_transformer"),
        ("InferenceBuilder", "transformer_inference"),
        ("QuantizerBuilder", "quantizer"),
        ("RandomLTDBuilder", "random_ltd"),
        ("SpatialInferenceBuilder", "spatial_inference"),
        ("ShareMemCommBuilder", "deepspeed_shm_comm"),
        ("PinMemoryBuilder", "pin_memory"),
        ("FPQuantizerBuilder", "fp_quantizer"),
        ("EvoformerAttnBuilder", "evoformer_attn"),
    ],
)
def test_op_names_are_deepspeeds(class_name: str, name: str) -> None:
    assert op_table.by_builder(class_name).name == name


def test_the_plugins_own_builder_comes_first(zap: Path) -> None:
    builder = op_builder.find("FusedAdamBuilder", "zap_plugin.op_builder", "zap")
    assert builder.__module__ == "zap_plugin.op_builder.fused_adam"
    assert builder.BUILD_VAR == "DS_BUILD_FUSED_ADAM"
    assert builder().absolute_name() == "zap_plugin.ops.fused_adam_op"


def test_classes_that_builders_derive_from_are_no_ops(zap: Path) -> None:
    assert op_builder.is_base("ZAPOpBuilder", "zap_plugin.op_builder")
    assert op_builder.is_base("CPUKernelBuilder", None)
    assert not op_builder.is_base("FusedAdamBuilder", "zap_plugin.op_builder")
    assert not op_builder.is_base("FusedLambBuilder", None)


def test_a_devices_kernels_are_its_own(zap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(CppOpBuilder, "load", lambda self, verbose=True: loaded.append(type(self).__module__))
    monkeypatch.setattr("ds_plugin_sdk.ops._first_call.has_kernels", lambda *_: True)  # is asked after load()
    op_builder.use_package("zap", "zap_plugin.op_builder")
    op_builder.load_family("adam", "zap")
    op_builder.load_family("adam", "cpu")
    assert loaded == ["zap_plugin.op_builder.fused_adam", "ds_plugin_sdk.op_builder.cpu.kernels"]


def test_host_ops_serve_every_device(zap: Path) -> None:
    builder = op_builder.find("CPUAdamBuilder", "zap_plugin.op_builder", "zap")
    assert builder.__module__ == "ds_plugin_sdk.op_builder.cpu.kernels"
    for device in ("cpu", "cuda", "zap"):
        files = op_builder.find("AsyncIOBuilder", "zap_plugin.op_builder" if device == "zap" else None, device)
        assert files.__module__ == "ds_plugin_sdk.op_builder.cpu.host"
        assert op_builder.find("GDSBuilder", None, device) is not files


def test_a_device_op_without_a_kernel_falls_back_to_the_reference(zap: Path) -> None:
    builder = op_builder.find("FusedLionBuilder", "zap_plugin.op_builder", "zap")
    assert issubclass(builder, ReferenceOpBuilder)
    assert builder.NAME == "fused_lion"


@pytest.fixture
def lion_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_module, "_modules", {})


@pytest.mark.usefixtures("lion_not_loaded")
def test_the_reference_for_want_of_a_kernel_is_one_warning(zap: Path) -> None:
    builder = op_builder.find("FusedLionBuilder", "zap_plugin.op_builder", "zap")
    with pytest.warns(RuntimeWarning, match="'lion' falls back .* the plugin has no native kernel") as caught:
        builder().load(verbose=False)
        builder().load(verbose=False)
    assert len(caught) == 1


@pytest.mark.usefixtures("lion_not_loaded")
def test_the_reference_for_want_of_a_kernel_can_be_forbidden(zap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PLUGIN_FALLBACK", "0")
    builder = op_builder.find("FusedLionBuilder", "zap_plugin.op_builder", "zap")
    for _ in range(2):
        with pytest.raises(OpNotImplementedError, match=r"no native kernel .* \(op 'fused_lion'\).*FALLBACK=0"):
            builder().load(verbose=False)
    op_builder.find("UtilsBuilder", "zap_plugin.op_builder", "zap")().load(verbose=False)  # plain torch on every device


def test_an_unknown_op_has_a_stub_of_its_name() -> None:
    builder = op_builder.find("FlashAttentionBuilder", None, "cpu")
    assert issubclass(builder, NotImplementedBuilder)
    assert builder is op_builder.find("FlashAttentionBuilder", None, "cpu")
    assert not builder().is_compatible(verbose=True)  # without a warning: DeepSpeed's report asks all names so


def test_a_broken_builder_module_costs_its_own_ops_only(zap: Path) -> None:
    (zap / "op_builder" / "broken.py").write_text("import nothing_of_that_name\n", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match=r"zap_plugin.op_builder.broken are skipped \(package 'zap_plugin'\)"):
        builder = op_builder.find("FusedAdamBuilder", "zap_plugin.op_builder", "zap")
    assert builder.__module__ == "zap_plugin.op_builder.fused_adam"


def test_builders_in_folders_of_the_package_are_found(zap: Path) -> None:
    folder = zap / "op_builder" / "optimizers"
    folder.mkdir()
    (zap / "op_builder" / "fused_adam.py").rename(folder / "adam.py")
    (folder / "__init__.py").write_text("", encoding="utf-8")
    builder = op_builder.find("FusedAdamBuilder", "zap_plugin.op_builder", "zap")
    assert builder.__module__ == "zap_plugin.op_builder.optimizers.adam"


def test_kernel_paths_are_absolute_and_inside_the_package(zap: Path) -> None:
    builder = op_builder.find("FusedAdamBuilder", "zap_plugin.op_builder", "zap")()
    assert builder.sources() == [str(zap / "csrc" / "adam.cpp")]
    assert builder.include_paths() == [str(zap / "csrc" / "include")]
    assert builder.is_compatible()


@pytest.mark.parametrize("path", ["../outside.cpp", "csrc/../../outside.cpp", "/etc/passwd"])
def test_kernel_paths_never_leave_the_package(zap: Path, path: str) -> None:
    builder = op_builder.find("FusedAdamBuilder", "zap_plugin.op_builder", "zap")()
    with pytest.raises(SdkError, match="leads out of its plugin"):
        builder.kernel_path(path)


def test_links_inside_the_package_lead_to_files_elsewhere(zap: Path, tmp_path: Path) -> None:
    """As `uv pip install --link-mode symlink` and strict editable installs make a link of each file."""
    (zap / "op_builder" / "near.cpp").write_text("int near;\n", encoding="utf-8")
    for number, file in enumerate([file for file in zap.rglob("*") if file.is_file()]):
        elsewhere = tmp_path / "store" / str(number)
        elsewhere.mkdir(parents=True)
        file.rename(elsewhere / file.name)
        file.symlink_to(elsewhere / file.name)
    builder = op_builder.find("FusedAdamBuilder", "zap_plugin.op_builder", "zap")()
    assert builder.sources() == [str(zap / "csrc" / "adam.cpp")]
    assert builder.kernel_path("near.cpp") == str(zap / "op_builder" / "near.cpp")
    assert builder.is_compatible()
    before = make_request(builder.build_spec()).facts
    (zap / "csrc" / "adam.cpp").resolve().write_text("// another\n", encoding="utf-8")
    assert make_request(builder.build_spec()).facts != before


def test_a_path_does_not_leave_the_package_by_way_of_a_linked_folder(zap: Path, tmp_path: Path) -> None:
    (tmp_path / "store" / "csrc").mkdir(parents=True)
    (tmp_path / "store" / "other.cpp").write_text("// not ours\n", encoding="utf-8")
    (zap / "linked").symlink_to(tmp_path / "store" / "csrc")
    builder = op_builder.find("FusedAdamBuilder", "zap_plugin.op_builder", "zap")()
    assert builder.kernel_path("linked/../other.cpp") == str(zap / "other.cpp")


def test_an_absolute_path_may_name_the_package_by_a_link(zap: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(zap.parent)
    builder = op_builder.find("FusedAdamBuilder", "zap_plugin.op_builder", "zap")()
    assert builder.kernel_path(str(tmp_path / "link" / zap.name / "csrc" / "adam.cpp")) == str(
        zap / "csrc" / "adam.cpp"
    )


def test_extensions_written_for_deepspeeds_tree_count_from_the_builder(zap: Path) -> None:
    (zap / "op_builder" / "csrc").mkdir()
    (zap / "op_builder" / "csrc" / "near.cpp").write_text("// kernel\n", encoding="utf-8")
    (zap / "op_builder" / "ported.py").write_text(
        "from ds_plugin_sdk import SYCLOpBuilder\n"
        "class TransformerBuilder(SYCLOpBuilder):\n"
        "    NAME = 'transformer'\n"
        "    def sources(self):\n"
        "        return [self.sycl_kernel_path('csrc/near.cpp')]\n",
        encoding="utf-8",
    )
    builder = op_builder.find("TransformerBuilder", "zap_plugin.op_builder", "zap")
    assert issubclass(builder, SYCLOpBuilder)
    assert builder().sources() == [str(zap / "op_builder" / "csrc" / "near.cpp")]


def test_a_missing_source_makes_the_op_incompatible_and_says_why(zap: Path) -> None:
    (zap / "csrc" / "adam.cpp").unlink()
    builder = op_builder.find("FusedAdamBuilder", "zap_plugin.op_builder", "zap")()
    assert not builder.is_compatible()
    assert "adam.cpp" in str(builder.error_log)
    with pytest.warns(RuntimeWarning, match="source files are missing"):
        builder.is_compatible(verbose=True)


@pytest.mark.parametrize("owner", ["", "zap-bare", "zap-not-there"])
def test_an_op_of_a_distribution_without_metadata_has_no_known_version(
    zap: Path, tmp_path: Path, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zap_bare-1.0.dist-info").mkdir()
    builder = op_builder.find("FusedAdamBuilder", "zap_plugin.op_builder", "zap")
    monkeypatch.setattr(builder, "owner", lambda self: owner)
    assert builder()._version() == "unknown"


def test_builder_classes_state_their_name_once() -> None:
    class SomethingBuilder(CppOpBuilder):
        NAME = "something"

    assert SomethingBuilder().name == "something"
    assert SomethingBuilder.BUILD_VAR == "DS_BUILD_SOMETHING"
    with pytest.raises(NotImplementedError, match="must list the op's source files"):
        SomethingBuilder().sources()


def test_where_the_sdk_s_builders_are_missing_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that was frozen without them."""
    monkeypatch.setattr(lookup, "builders_in", lambda package: {})
    monkeypatch.setattr(lookup, "_sources", [])  # DeepSpeed's, where a test before this one has imported it
    assert issubclass(op_builder.find("FusedAdamBuilder", None, "cpu"), ReferenceOpBuilder)
