"""Additions to a residual."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class ResidualBuilder(CUDAKernelBuilder):
    """Additions to a residual."""

    NAME: ClassVar[str] = "residual"
