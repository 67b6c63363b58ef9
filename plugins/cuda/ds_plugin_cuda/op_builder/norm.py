"""Layer norm and RMS norm."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class NormBuilder(CUDAKernelBuilder):
    """Layer norm and RMS norm."""

    NAME: ClassVar[str] = "norm"
