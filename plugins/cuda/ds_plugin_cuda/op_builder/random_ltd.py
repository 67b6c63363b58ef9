"""Random layerwise token dropping."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class RandomLTDBuilder(CUDAKernelBuilder):
    """Random layerwise token dropping."""

    NAME: ClassVar[str] = "random_ltd"
