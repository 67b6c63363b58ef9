"""The binaries in the wheels of plugins."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from pathlib import Path

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.errors import PluginError
from ds_plugin_sdk.registry.scan import Candidate, scan
from ds_plugin_sdk.registry.select import allowed


def load_kernels(family: str, device_type: str) -> None:
    """`op_builder.load_kernels`, with the binaries of all installed plugins to choose from.

    For programs that use ops and never ask for an accelerator, which is what offers its plugin's otherwise.
    """
    _offer_all()
    op_builder.load_kernels(family, device_type)


def offer(candidate: Candidate) -> None:
    """Let ops be taken from a plugin's wheel, where the sources they were made from are those of the SDK."""
    package = candidate.manifest.prebuilt
    if package is not None:
        op_builder.add_prebuilt(candidate.name, _folder(package) / "prebuilt")


@functools.cache
def _offer_all() -> None:
    for candidate in itertools.chain.from_iterable(scan().values()):
        if allowed(candidate.name):
            # Whoever chooses an accelerator is told what is wrong with its plugin.
            with contextlib.suppress(PluginError, ImportError):
                offer(candidate)


def _folder(package: str) -> Path:
    module = importlib.import_module(package)
    return Path(str(module.__file__)).resolve().parent
