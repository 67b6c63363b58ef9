"""With ``DS_BUILD_OPS=1`` the wheel carries compiled ops; without it the wheel is pure Python.

The ops are compiled by the SDK's own build path (`ds_plugin_sdk.prebuild`), so the SDK, torch and nvcc must be there
where the wheel is built; a GPU need not: ``DS_BUILD_OPS=1 pip wheel --no-build-isolation --no-deps plugins/cuda``.
``TORCH_CUDA_ARCH_LIST`` says for which GPUs.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltOps(BuildHookInterface):  # type: ignore[type-arg]  # hatchling gives no type for the config
    """Compile the wanted ops into the wheel's folder ``ds_plugin_cuda/prebuilt``."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        # An isolated build of a pure wheel has no SDK to ask for its settings.
        wanted = any(name.startswith("DS_BUILD_") and value == "1" for name, value in os.environ.items())
        if not wanted:
            return
        self._compile(Path(self.directory) / "prebuilt", build_data)

    def _compile(self, folder: Path, build_data: dict[str, Any]) -> None:
        try:
            from ds_plugin_sdk import op_builder, prebuild
        except ImportError as error:
            raise RuntimeError(
                "DS_BUILD_OPS=1 needs ds-plugin-sdk and torch where the wheel is built: "
                "install them, then add --no-build-isolation"
            ) from error

        sys.path.insert(0, self.root)  # the builders that this wheel is about to carry
        shutil.rmtree(folder, ignore_errors=True)
        classes = op_builder.builders("ds_plugin_cuda.op_builder", "cuda").values()
        builders = [cls() for cls in classes if issubclass(cls, op_builder.CUDAOpBuilder)]
        for builder in prebuild.distinct(filter(prebuild.wanted_in_wheel, builders)):
            artifact = prebuild.build(builder, folder)
            self.app.display_info(f"compiled {builder.name} in {artifact.seconds:.1f} s")
        build_data["force_include"][str(folder)] = "ds_plugin_cuda/prebuilt"
        build_data["pure_python"] = False
        # The binaries use torch's stable ABI and no Python: one wheel serves every Python of this platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
