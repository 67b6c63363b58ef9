"""Biases and residuals of diffusion models, channels last."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class SpatialInferenceBuilder(CPUKernelBuilder):
    """Biases and residuals of diffusion models, channels last."""

    NAME: ClassVar[str] = "spatial_inference"
