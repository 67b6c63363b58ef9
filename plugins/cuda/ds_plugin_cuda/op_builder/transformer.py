"""What a transformer layer does between its matrix products, forward and backward."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_cuda.op_builder.cuda_kernels import CUDAKernelBuilder


class TransformerBuilder(CUDAKernelBuilder):
    """What a transformer layer does between its matrix products, forward and backward."""

    NAME: ClassVar[str] = "transformer"


class StochasticTransformerBuilder(TransformerBuilder):
    """The same kernels by DeepSpeed's other name."""

    NAME: ClassVar[str] = "stochastic_transformer"
