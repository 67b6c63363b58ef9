"""Residual additions."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class ResidualBuilder(CPUKernelBuilder):
    """Residual additions."""

    NAME: ClassVar[str] = "residual"
