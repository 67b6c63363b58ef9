"""Builders of the SDK's host libraries: what runs on the host alone, and serves every device."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import ClassVar

from ds_plugin_sdk.op_builder import op_table
from ds_plugin_sdk.op_builder.builder import Library, builders_of
from ds_plugin_sdk.op_builder.languages import CppOpBuilder
from ds_plugin_sdk.paths import kernels_root


class HostLibraryBuilder(CppOpBuilder):
    """A family's ``kernels/host/<family>.cpp``. `ds_plugin_sdk.ops.<family>` gets the library by its `use_library`."""

    NAME: ClassVar[str] = ""

    def owner(self) -> str:
        return "ds-plugin-sdk"

    def kernel_root(self) -> Path:
        return kernels_root()

    def sources(self) -> list[str]:
        return [self.kernel_path(f"host/{op_table.family_of(self.NAME)}.cpp")]

    def cxx_args(self) -> list[str]:
        return ["-pthread"]

    def _use_library(self, library: Library) -> None:
        importlib.import_module(f"ds_plugin_sdk.ops.{op_table.family_of(self.NAME)}").use_library(library)


# AsyncIOBuilder: a class for each op of the table that is a host library.
BUILDERS = builders_of(HostLibraryBuilder, [op for op in op_table.OPS if op.host])
globals().update(BUILDERS)
