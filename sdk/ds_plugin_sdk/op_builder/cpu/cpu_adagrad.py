"""Adagrad."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class CPUAdagradBuilder(CPUKernelBuilder):
    """Adagrad."""

    NAME: ClassVar[str] = "cpu_adagrad"
