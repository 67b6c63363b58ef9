"""Activations with bias, and gated ones."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class ActivationBuilder(CUDAKernelBuilder):
    """Activations with bias, and gated ones."""

    NAME: ClassVar[str] = "activation"
