"""The CUDA plugin's kernels as CPU ops: compiled for the host, with `kernels/tests/cuda_on_host` for a GPU.

What conformance checks on a GPU, bindings included, can then be checked without one:
``PYTHONPATH=plugins/cuda:tests/cuda sdk conformance cuda_on_host:CudaOnHost --level ops``. Misaligned accesses of 16
bytes trap, as they would on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from ds_plugin_cpu.accelerator import CPU_Accelerator
from ds_plugin_cuda.op_builder.kernels import CUDAKernelBuilder
from ds_plugin_sdk import op_builder
from ds_plugin_sdk.jit import Source
from ds_plugin_sdk.op_builder import op_table

ROOT = Path(__file__).resolve().parents[2]
ON_HOST = ROOT / "kernels" / "tests" / "cuda_on_host"


class OnHostKernelBuilder(CUDAKernelBuilder):
    """A family of the CUDA kernels, compiled by the C++ compiler."""

    TOOLCHAIN: ClassVar[str] = "cxx"
    NAME: ClassVar[str] = ""

    def owner(self) -> str:
        return "ds-plugin-cuda-on-host"

    def include_paths(self) -> list[str]:
        return [str(ON_HOST)]

    def cxx_args(self) -> list[str]:
        # __shared__ becomes static, and memory is accessed through uint4.
        defines = ["-DDS_KERNELS_CUDA_ON_HOST", "-DDS_KERNELS_CUDA_KEY=CPU"]
        traps = ["-fsanitize=alignment,bounds,shift", "-fsanitize-undefined-trap-on-error"]
        return ["-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas", *defines, *traps]

    def compile_units(self, portable: bool) -> tuple[Source, ...]:
        return tuple(Source(Path(source), ("-x", "c++")) for source in self.sources())


def _builders() -> dict[str, type[OnHostKernelBuilder]]:
    """One for each name by which the CPU or the GPU knows a family of CUDA kernels."""
    on_gpu = op_builder.builders("ds_plugin_cuda.op_builder", "cuda")
    ported = {op_table.family_of(cls.NAME) for cls in on_gpu.values() if issubclass(cls, CUDAKernelBuilder)}
    names = {**op_builder.builders(None, "cpu"), **on_gpu}
    return {
        name: type(name, (OnHostKernelBuilder,), {"NAME": cls.NAME, "__module__": __name__})
        for name, cls in names.items()
        if op_table.family_of(cls.NAME) in ported
    }


globals().update(_builders())


class CudaOnHost(CPU_Accelerator):
    """The CPU, with the CUDA plugin's kernels."""

    op_builders: ClassVar[str] = "cuda_on_host"

    def supported_dtypes(self) -> list[torch.dtype]:
        """Those of a current GPU, whatever this CPU computes in: the kernels have all of them."""
        return [torch.float32, torch.bfloat16, torch.float16]
