"""Lion over lists of tensors."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class FusedLionBuilder(CPUKernelBuilder):
    """Lion over lists of tensors."""

    NAME: ClassVar[str] = "fused_lion"
