"""Adam and AdamW, as DeepSpeed's host optimizer asks for them."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.cpu.cpu_kernels import CPUKernelBuilder


class CPUAdamBuilder(CPUKernelBuilder):
    """Adam and AdamW, as DeepSpeed's host optimizer asks for them."""

    NAME: ClassVar[str] = "cpu_adam"
