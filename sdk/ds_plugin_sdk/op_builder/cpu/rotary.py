"""Rotary position embedding."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class RotaryBuilder(CPUKernelBuilder):
    """Rotary position embedding."""

    NAME: ClassVar[str] = "rotary"
