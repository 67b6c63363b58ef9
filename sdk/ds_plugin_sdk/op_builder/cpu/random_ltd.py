"""Random layerwise token dropping."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class RandomLTDBuilder(CPUKernelBuilder):
    """Random layerwise token dropping."""

    NAME: ClassVar[str] = "random_ltd"
