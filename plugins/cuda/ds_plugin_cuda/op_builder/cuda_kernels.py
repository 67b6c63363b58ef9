"""How the CUDA kernels are compiled: launches by nvcc, without torch; bindings by the host compiler."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from ds_plugin_sdk.op_builder import CUDAOpBuilder, families
from ds_plugin_sdk.paths import kernels_root


class CUDAKernelBuilder(CUDAOpBuilder):
    """A family of the CUDA kernels: ``kernels/cuda/<family>.cu`` and ``<family>_binding.cpp``."""

    NAME: ClassVar[str] = ""

    def kernel_root(self) -> Path:
        return kernels_root()

    def sources(self) -> list[str]:
        family = families.of(self.NAME)
        return [self.kernel_path(f"cuda/{family}.cu"), self.kernel_path(f"cuda/{family}_binding.cpp")]

    def cxx_args(self) -> list[str]:
        return ["-O1"]  # bindings have no loops over elements
