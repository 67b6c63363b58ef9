"""Attention over a cache of keys and values."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class AttentionBuilder(CUDAKernelBuilder):
    """Attention over a cache of keys and values."""

    NAME: ClassVar[str] = "attention"
