"""Softmax of attention scores."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class SoftmaxBuilder(CPUKernelBuilder):
    """Softmax of attention scores."""

    NAME: ClassVar[str] = "softmax"
