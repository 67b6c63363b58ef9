"""Attention over a cache of keys and values."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class AttentionBuilder(CPUKernelBuilder):
    """Attention over a cache of keys and values."""

    NAME: ClassVar[str] = "attention"
