"""The binaries in the wheels of plugins."""

from __future__ import annotations

import importlib

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.errors import PluginLoadError
from ds_plugin_sdk.paths import folder_of
from ds_plugin_sdk.registry.scan import Candidate


def offer(candidate: Candidate) -> None:
    """Let ops be taken from a plugin's wheel, where the sources they were made from are those of the SDK.

    Raises:
        PluginLoadError: the package that the manifest names cannot be imported.
    """
    package = candidate.manifest.prebuilt
    if package is None:
        return
    try:
        folder = folder_of(importlib.import_module(package))
    except Exception as error:
        raise PluginLoadError(
            "a plugin's prebuilt ops cannot be looked for",
            plugin=candidate.name,
            why=f"prebuilt={package!r} in the manifest of {candidate}: {type(error).__name__}: {error}",
            hint="it names the package whose folder 'prebuilt' has them",
        ) from error
    op_builder.add_prebuilt(candidate.name, folder / "prebuilt")
