"""Gives hatchling the SDK's build hook, which compiles ops into the wheel when DS_BUILD_OPS=1 asks for them.

Without the SDK, as in an isolated build, the wheel is pure Python.
"""

import importlib.util
import os

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if importlib.util.find_spec("ds_plugin_sdk"):
    from ds_plugin_sdk.build_hook import OpsBuildHook
else:

    class OpsBuildHook(BuildHookInterface):
        def initialize(self, version, build_data):
            no = ("", "0", "false", "no", "off")
            wanted = [n for n, value in os.environ.items() if n.startswith("DS_BUILD_") and value.lower() not in no]
            if wanted and version != "editable":
                raise RuntimeError(
                    f"{wanted[0]}={os.environ[wanted[0]]} asks for compiled ops, and ds-plugin-sdk is not installed "
                    "where the wheel is built: pip install 'ds-plugin-sdk[vendor]', and pip's --no-build-isolation"
                )


__all__ = ["OpsBuildHook"]
