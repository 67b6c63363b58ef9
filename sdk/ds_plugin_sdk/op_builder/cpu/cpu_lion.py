"""Lion, as DeepSpeed's host optimizer asks for it."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class CPULionBuilder(CPUKernelBuilder):
    """Lion, as DeepSpeed's host optimizer asks for it."""

    NAME: ClassVar[str] = "cpu_lion"
