"""Softmax of attention scores."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class SoftmaxBuilder(CUDAKernelBuilder):
    """Softmax of attention scores."""

    NAME: ClassVar[str] = "softmax"
