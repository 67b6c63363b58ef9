"""Linear layers for inference."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class LinearBuilder(CPUKernelBuilder):
    """Linear layers for inference, with weights in floating point or in int8."""

    NAME: ClassVar[str] = "linear"
