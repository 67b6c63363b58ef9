"""The torch backend comes out of the plugin's wheel, also where a program makes the accelerator itself."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.privateuse1.build import BackendBuilder

VENDORS = """
from ds_plugin_sdk.privateuse1 import RuntimeBuilder
class DeviceRuntime(RuntimeBuilder):
    def sources(self): return []
"""


def test_the_backend_is_looked_for_beside_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ds_plugin_wheel"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "runtime.py").write_text(VENDORS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    runtime = importlib.import_module("ds_plugin_wheel.runtime").DeviceRuntime()
    install = sys.modules["ds_plugin_sdk.privateuse1.install"]
    monkeypatch.setattr(op_builder.builder, "_prebuilt", {})
    monkeypatch.setattr(install, "_module", None)
    monkeypatch.setattr(install, "_check_name", lambda name: None)
    monkeypatch.setattr(install.build, "load_runtime", lambda builder: None)

    def load(builder: BackendBuilder) -> None:
        raise LookupError(builder.build_spec().prebuilt_dirs)

    monkeypatch.setattr(install.build, "load_backend", load)
    with pytest.raises(LookupError) as told:
        install.install("wheel", runtime=runtime)
    assert package / "prebuilt" in told.value.args[0]
