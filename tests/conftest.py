"""Fixtures that several folders of tests use."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., Path]

MANIFEST = """\
from ds_plugin_sdk import Plugin, Probe
plugin = Plugin({name!r}, {sdk_api}, {accelerator!r}, probe=lambda: {probe}, priority={priority})
"""


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the settings or the cache of the user who runs it."""
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(tmp_path / "kernel-cache"))
    for variable in (
        "DS_ACCELERATOR",
        "DS_PLUGINS",
        "DS_PLUGIN_COMPILE",
        "DS_PLUGIN_FALLBACK",
        "DS_PLUGIN_PROVENANCE",
    ):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a plugin: a real distribution, found by its metadata, in a folder on ``sys.path`` and ``PYTHONPATH``.

    ``install("zap", probe=..., body=..., distribution=...)`` returns the folder.
    """
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    before = set(sys.modules)

    def write(
        name: str,
        *,
        probe: str = "Probe.available(devices=1)",
        priority: int = 10,
        sdk_api: tuple[int, int] = (1, 0),
        accelerator: str = "ds_plugin_cpu.accelerator:CPU_Accelerator",
        distribution: str | None = None,
        body: str | None = None,
    ) -> Path:
        title = distribution or f"ds-plugin-{name}"
        module = title.replace("-", "_")
        info = site / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[ds_plugin_sdk.plugins]\n{name} = {module}:plugin\n", encoding="utf-8")
        text = MANIFEST.format(name=name, sdk_api=sdk_api, accelerator=accelerator, probe=probe, priority=priority)
        (site / f"{module}.py").write_text(text if body is None else body, encoding="utf-8")
        importlib.invalidate_caches()
        return site

    yield write
    for module in set(sys.modules) - before:
        if module.startswith("ds_plugin_") and not module.startswith(("ds_plugin_sdk", "ds_plugin_cpu")):
            del sys.modules[module]
