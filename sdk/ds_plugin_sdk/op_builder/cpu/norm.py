"""Layer norm and RMS norm."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class NormBuilder(CPUKernelBuilder):
    """Layer norm and RMS norm."""

    NAME: ClassVar[str] = "norm"
