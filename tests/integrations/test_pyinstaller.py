"""What PyInstaller is told where a program imports DeepSpeed or the SDK: it cannot see what is found by name."""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def hook(module: str) -> Path:
    """The hook of a module as PyInstaller finds it: through the SDK's entry point."""
    found = [entry for entry in entry_points(group="pyinstaller40", name="hook-dirs") if "ds_plugin_sdk" in entry.value]
    assert found, "the SDK is installed without its entry point for PyInstaller"
    (folder,) = found[0].load()()
    return Path(folder, f"hook-{module}.py")


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the hook of the SDK says; PyInstaller's functions answer with what they were asked for."""
    put_pyinstaller(monkeypatch)
    return runpy.run_path(str(hook("ds_plugin_sdk")))


def put_pyinstaller(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: Any = ModuleType("PyInstaller.utils.hooks")
    hooks.collect_all = lambda package: ([f"files of {package}"], [f"libraries of {package}"], [f"{package}.part"])
    hooks.collect_dynamic_libs = lambda package, search_patterns: [f"{search_patterns} of {package}"]
    hooks.collect_entry_point = lambda group: ([f"metadata of {group}"], [f"modules of {group}"])
    for name in ("PyInstaller", "PyInstaller.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "PyInstaller.utils.hooks", hooks)


@pytest.mark.parametrize("group", ["torch.backends", "ds_plugin_sdk.plugins"])
def test_entry_points_come_with_their_modules(group: str, collected: dict[str, Any]) -> None:
    assert f"metadata of {group}" in collected["datas"]
    assert f"modules of {group}" in collected["hiddenimports"]


@pytest.mark.parametrize("package", ["ds_plugin_sdk", "ds_plugin_cpu"])
def test_packages_come_with_all_their_files(package: str, collected: dict[str, Any]) -> None:
    assert f"files of {package}" in collected["datas"]
    assert f"libraries of {package}" in collected["binaries"]
    assert f"{package}.part" in collected["hiddenimports"]


def test_kernels_come_though_they_are_not_called_lib(collected: dict[str, Any]) -> None:
    assert "['*.so'] of ds_plugin_cpu" in collected["binaries"]


def test_a_program_that_imports_deepspeed_alone_has_the_sdk_too(monkeypatch: pytest.MonkeyPatch) -> None:
    put_pyinstaller(monkeypatch)
    found = runpy.run_path(str(hook("deepspeed")))
    assert (found["datas"], found["binaries"]) == (["files of deepspeed"], ["libraries of deepspeed"])
    assert found["hiddenimports"] == ["deepspeed.part", "ds_plugin_sdk"]
