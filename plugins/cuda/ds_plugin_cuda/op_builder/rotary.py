"""Rotary position embedding."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class RotaryBuilder(CUDAKernelBuilder):
    """Rotary position embedding."""

    NAME: ClassVar[str] = "rotary"
