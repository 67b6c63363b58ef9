"""Manifests that do too much, or promise it."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.registry import Probe
from mutants.mutant import INSTALLED, mutant
from mutants.runtime.support import member

_MANIFEST = """\
{first}
from ds_plugin_sdk import Plugin, Probe
plugin = Plugin("{name}", (1, 0), "{accelerator}", probe=lambda: Probe.available({devices}))
"""


def installed(name: str, first: str, accelerator: str, devices: str) -> None:
    """Install a plugin of this name, for this process and those it starts: its manifest's first line, what it names.

    Args:
        name: the plugin's.
        first: a line with which its manifest begins.
        accelerator: the class that it names.
        devices: an expression for the number of devices that its probe tells.
    """
    site = Path(tempfile.mkdtemp(prefix="conformance-mutant-"))
    info = site / f"ds_plugin_{name}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: ds-plugin-{name}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    entry_points = f"[ds_plugin_sdk.plugins]\n{name} = ds_plugin_{name}:plugin\n"
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    (site / f"ds_plugin_{name}.py").write_text(
        _MANIFEST.format(name=name, first=first, accelerator=accelerator, devices=devices), encoding="utf-8"
    )
    sys.path.append(str(site))


def _another_manifest(target: Target, name: str, first: str) -> Target:
    """The target under another name, by a manifest that begins with a line."""
    installed(name, first, "ds_plugin_cpu.accelerator:CPU_Accelerator", "1")
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


@mutant("manifest.prints", "R10.6", "runtime")
def prints(target: Target) -> Target:
    """The manifest greets."""
    return _another_manifest(target, "greeting", 'print("zap: driver 1.2")')


@mutant("manifest.probe_prints_below", "R10.6", "runtime")
def probe_prints_below(target: Target) -> Target:
    """The driver's library, which the manifest asks, warns on the standard error output by itself."""
    return _another_manifest(target, "warning", 'import os; os.write(2, b"zap: old firmware")')


@mutant("manifest.hidden_counted", "R10.3", "runtime", target=INSTALLED, only="runtime.manifest.probe_is_honest/1")
def hidden_counted(target: Target) -> Target:
    """`probe()` counts hidden devices, as the driver's files are."""
    assert target.plugin is not None
    installed("counting", "", target.plugin.accelerator, "2")
    return dataclasses.replace(target, plugin=dataclasses.replace(target.plugin, name="counting"))


_made: list[int] = []


def _counted(self: Any) -> int:
    if "number" not in self.__dict__:
        _made.append(1)
        self.__dict__["number"] = len(_made)
    return int(self.__dict__["number"])


member("manifest.counts_instances", "R10.5", "Each instance counts one more device.", device_count=_counted)
