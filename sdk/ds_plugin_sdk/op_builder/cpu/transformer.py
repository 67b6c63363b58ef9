"""What a transformer layer does between its matrix products."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class TransformerBuilder(CPUKernelBuilder):
    """The transformer layer for training."""

    NAME: ClassVar[str] = "transformer"


class StochasticTransformerBuilder(CPUKernelBuilder):
    """The same; it differs on GPUs only."""

    NAME: ClassVar[str] = "stochastic_transformer"
