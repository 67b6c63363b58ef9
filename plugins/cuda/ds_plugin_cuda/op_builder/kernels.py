"""Builders of the CUDA kernels: launches are compiled by nvcc, without torch; bindings by the host compiler."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from ds_plugin_sdk.op_builder import CUDAOpBuilder, builders_of, op_table
from ds_plugin_sdk.paths import kernels_root

# Those that have a kernel. A line here makes a builder of each of the family's ops.
FAMILIES = (
    "activation",
    "adagrad",
    "adam",
    "attention",
    "cross_entropy",
    "evoformer_attn",
    "fp_quantizer",
    "lamb",
    "linear",
    "lion",
    "norm",
    "quantizer",
    "random_ltd",
    "residual",
    "rotary",
    "softmax",
    "spatial",
    "transformer",
)


class CUDAKernelBuilder(CUDAOpBuilder):
    """A family of the CUDA kernels: ``kernels/cuda/<family>.cu`` and ``<family>_binding.cpp``."""

    NAME: ClassVar[str] = ""

    def kernel_root(self) -> Path:
        return kernels_root()

    def sources(self) -> list[str]:
        family = op_table.family_of(self.NAME)
        return [self.kernel_path(f"cuda/{family}.cu"), self.kernel_path(f"cuda/{family}_binding.cpp")]

    def cxx_args(self) -> list[str]:
        return ["-O1"]  # bindings have no loops over elements


BUILDERS = builders_of(CUDAKernelBuilder, [op for op in op_table.OPS if op.family in FAMILIES and not op.cpu_only])
# DeepSpeed's own computes on tensor cores; it wants CUTLASS and a compiler for CUDA, and has no float32.
BUILDERS["EvoformerAttnBuilder"].YIELDS = True
globals().update(BUILDERS)
