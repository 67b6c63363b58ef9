"""Grouped quantization to 8 and 4 bits."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class QuantizerBuilder(CUDAKernelBuilder):
    """Grouped quantization to 8 and 4 bits."""

    NAME: ClassVar[str] = "quantizer"
