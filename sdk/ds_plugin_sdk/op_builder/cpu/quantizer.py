"""Grouped quantization to 8 and 4 bits: ZeRO++ and weight-only quantization."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class QuantizerBuilder(CPUKernelBuilder):
    """Grouped quantization to 8 and 4 bits."""

    NAME: ClassVar[str] = "quantizer"
