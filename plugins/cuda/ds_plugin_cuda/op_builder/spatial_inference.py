"""Biases and residuals of diffusion models, channels last."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class SpatialInferenceBuilder(CUDAKernelBuilder):
    """Biases and residuals of diffusion models, channels last."""

    NAME: ClassVar[str] = "spatial_inference"
