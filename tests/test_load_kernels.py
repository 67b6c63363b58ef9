"""Kernels for programs that use ops and never ask for an accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_plugin_sdk import op_builder, registry
from ds_plugin_sdk.registry import kernels
from plugin_site import Install

ACCELERATOR = """\
from ds_plugin_cpu.accelerator import CPU_Accelerator

class Zap(CPU_Accelerator):
    device_type = "zap"
    op_builders = "zap_builders"

    def device_name(self, device_index=None):
        return "zap"
"""


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The builder packages that are used, by device; nothing is loaded."""
    packages: dict[str, str | None] = {}
    monkeypatch.setattr(op_builder, "use_package", packages.__setitem__)
    monkeypatch.setattr(op_builder, "load_family", lambda family, device_type: None)
    return packages


def install_zap(install: Install, **options: str) -> None:
    site: Path = install("zap", accelerator="ds_plugin_zap_accelerator:Zap", **options)
    (site / "ds_plugin_zap_accelerator.py").write_text(ACCELERATOR)
    kernels._use_builders_for.cache_clear()


def test_a_device_has_the_builders_of_its_plugin(install: Install, used: dict[str, str | None]) -> None:
    install_zap(install)
    registry.load_kernels("adam", "zap")
    assert used == {"zap": "zap_builders"}


def test_another_device_does_not(install: Install, used: dict[str, str | None]) -> None:
    install_zap(install)
    registry.load_kernels("adam", "zip")
    registry.load_kernels("adam", "cpu")
    assert used == {}


def test_a_plugin_without_its_device_is_not_used(install: Install, used: dict[str, str | None]) -> None:
    install_zap(install, probe="Probe.absent('no zap')")
    registry.load_kernels("adam", "zap")
    assert used == {}


def test_plugins_that_are_switched_off_are_not_used(
    install: Install, used: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_zap(install)
    monkeypatch.setenv("DS_PLUGIN_AUTOLOAD", "0")
    registry.load_kernels("adam", "zap")
    assert used == {}
