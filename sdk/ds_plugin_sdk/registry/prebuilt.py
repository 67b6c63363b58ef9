"""The binaries in the wheels of plugins."""

from __future__ import annotations

import importlib
from pathlib import Path

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.registry.scan import Candidate


def offer(candidate: Candidate) -> None:
    """Let ops be taken from a plugin's wheel, where the sources they were made from are those of the SDK."""
    package = candidate.manifest.prebuilt
    if package is not None:
        op_builder.add_prebuilt(candidate.name, _folder(package) / "prebuilt")


def _folder(package: str) -> Path:
    module = importlib.import_module(package)
    return Path(str(module.__file__)).resolve().parent
