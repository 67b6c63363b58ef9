"""Activations with their bias."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class ActivationBuilder(CPUKernelBuilder):
    """Activations with their bias."""

    NAME: ClassVar[str] = "activation"
