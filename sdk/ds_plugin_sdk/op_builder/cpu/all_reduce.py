"""Sums over the ranks of a machine."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class AllReduceBuilder(CPUKernelBuilder):
    """Sums over the ranks of a machine."""

    NAME: ClassVar[str] = "all_reduce"
