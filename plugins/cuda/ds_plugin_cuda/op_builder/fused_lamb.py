"""LAMB over lists of tensors."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class FusedLambBuilder(CUDAKernelBuilder):
    """LAMB over lists of tensors."""

    NAME: ClassVar[str] = "fused_lamb"
