"""Linear layers for inference, with weights in floating point or in int8."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class LinearBuilder(CUDAKernelBuilder):
    """Linear layers for inference, with weights in floating point or in int8."""

    NAME: ClassVar[str] = "linear"
