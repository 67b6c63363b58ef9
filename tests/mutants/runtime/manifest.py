"""Manifests that do too much, or promise it."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.registry import Probe
from mutants.mutant import mutant
from mutants.runtime.support import member

_MANIFEST = """\
{first}
from ds_plugin_sdk import Plugin, Probe
plugin = Plugin("{name}", (1, 0), "ds_plugin_cpu.accelerator:CPU_Accelerator", probe=lambda: Probe.available(1))
"""


def _another_manifest(target: Target, name: str, first: str) -> Target:
    """Install a plugin of this name, whose manifest begins with a line, for this process and those it starts."""
    site = Path(tempfile.mkdtemp(prefix="conformance-mutant-"))
    info = site / f"ds_plugin_{name}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: ds-plugin-{name}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    entry_points = f"[ds_plugin_sdk.plugins]\n{name} = ds_plugin_{name}:plugin\n"
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    (site / f"ds_plugin_{name}.py").write_text(_MANIFEST.format(name=name, first=first), encoding="utf-8")
    sys.path.append(str(site))
    assert target.plugin is not None
    return dataclasses.replace(target, plugin=dataclasses.replace(target.plugin, name=name))


@mutant("manifest.imports_torch", "R10.1", "runtime")
def imports_torch(target: Target) -> Target:
    """The manifest imports torch."""
    return _another_manifest(target, "heavy", "import torch")


@mutant("manifest.slow", "R10.2", "runtime")
def slow(target: Target) -> Target:
    """The manifest takes a second and a half to import."""
    return _another_manifest(target, "slow", "import time; time.sleep(1.5)")


@mutant("manifest.boasts", "R10.3", "runtime")
def boasts(target: Target) -> Target:
    """`probe()` tells of seven devices."""
    assert target.plugin is not None
    return dataclasses.replace(
        target, plugin=dataclasses.replace(target.plugin, probe=lambda: Probe.available(devices=7))
    )


@mutant("manifest.another_class", "R10.4", "runtime")
def another_class(target: Target) -> Target:
    """The manifest names a class that is not chosen."""
    assert target.plugin is not None
    return dataclasses.replace(target, plugin=dataclasses.replace(target.plugin, accelerator="nowhere:Nothing"))


_made: list[int] = []


def _counted(self: Any) -> int:
    if "number" not in self.__dict__:
        _made.append(1)
        self.__dict__["number"] = len(_made)
    return int(self.__dict__["number"])


member("manifest.counts_instances", "R10.5", "Each instance counts one more device.", device_count=_counted)
