"""hatchling's build hook of every plugin: with ``DS_BUILD_OPS=1`` its wheel carries compiled ops.

A plugin's ``hatch_build.py`` gives the hook to hatchling, and its ``pyproject.toml`` says what to compile: all builders
of a package, or one builder as ``module:Class``::

    [tool.hatch.build.targets.wheel]
    packages = ["ds_plugin_zap"]

    [tool.hatch.build.targets.wheel.hooks.custom]
    builders = ["ds_plugin_zap.op_builder", "ds_plugin_zap.runtime:DeviceRuntime"]

The binaries go into the folder ``prebuilt`` of the wheel's first package, which is the one that the manifest names in
`Plugin.prebuilt`.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

from ds_plugin_sdk import prebuild
from ds_plugin_sdk.errors import BuildError
from ds_plugin_sdk.settings import settings


class OpsBuildHook(BuildHookInterface[Any]):
    """Compiles the ops that ``DS_BUILD_OPS`` and ``DS_BUILD_<OP>`` ask for, for every machine of this architecture.

    Raises:
        SettingError: a variable says neither yes nor no.
        BuildError: the project does not say what to compile, or that cannot be compiled.
    """

    _binaries: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable" or not settings.may_build_ops():
            return
        package = Path(self._stated("packages", self.build_config.packages)[0])
        sys.path.insert(0, str(Path(self.root, package).parent))  # the builders that this wheel is about to carry
        found = prebuild.builders_in(self._stated("builders", self.config.get("builders")))
        builders = prebuild.distinct(filter(prebuild.wanted_in_wheel, found))
        if not builders:
            return
        # dist/ is for what is published, and other wheels may be built into it at the same time.
        self._binaries = tempfile.TemporaryDirectory(prefix="ds-plugin-sdk-wheel-")
        for builder in builders:
            artifact = prebuild.build(builder, Path(self._binaries.name))
            self.app.display_info(f"compiled {builder.name} in {artifact.seconds:.1f} s")
        # A package within a namespace looks for them in its own folder.
        roots, home = [builder.kernel_root() for builder in builders], Path(self.root, package).resolve().parent
        carrier = next((root.relative_to(home) for root in roots if root.is_relative_to(home)), Path(package.name))
        build_data["force_include"][self._binaries.name] = f"{carrier}/prebuilt"
        build_data["pure_python"] = False
        # Most binaries use torch's stable ABI and no Python. One that does not (a pybind11 module, a torch backend) is
        # used where Python and torch are those it was built with, and compiled elsewhere.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._binaries is not None:
            self._binaries.cleanup()

    def _stated(self, name: str, value: list[str] | None) -> list[str]:
        if not value:
            raise BuildError(
                "the wheel's ops cannot be compiled",
                plugin=self.metadata.name,
                why=f"pyproject.toml has no list '{name}' in [tool.hatch.build.targets.wheel] or its hooks.custom",
                hint="`sdk new-plugin` generates a project that has it",
            )
        return value
