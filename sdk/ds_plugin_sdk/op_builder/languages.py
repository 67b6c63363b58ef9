"""Builders by language: C++, CUDA, SYCL. They differ in the toolchain, which lives in `ds_plugin_sdk.jit`."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.errors import BuildError, ToolchainError
from ds_plugin_sdk.op_builder.builder import OpBuilder


class CppOpBuilder(OpBuilder):
    """An op in C++ for the CPU."""

    TOOLCHAIN: ClassVar[str] = "cxx"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Sources are there, and so is either a compiler or a binary."""
        if not super().is_compatible(verbose):
            return False
        from ds_plugin_sdk import jit

        try:
            jit.get_toolchain(self.TOOLCHAIN).find()
        except ToolchainError as error:
            try:
                found = jit.find(self.build_spec())
            except BuildError as raised:
                return self._incompatible(str(raised), verbose)
            if found is None:
                return self._incompatible(str(error), verbose)
        return True


class CUDAOpBuilder(CppOpBuilder):
    """An op in CUDA C++: ``.cu`` files by nvcc, the others by the host compiler.

    Architectures come from ``nvcc_args()``, else from ``TORCH_CUDA_ARCH_LIST``, else from this machine's GPUs; in a
    wheel, and where there is no GPU, there is code for every major one.
    """

    TOOLCHAIN: ClassVar[str] = "cuda"


class SYCLOpBuilder(CppOpBuilder):
    """An op in SYCL, with the names that extensions of Intel's kind use."""

    TOOLCHAIN: ClassVar[str] = "sycl"

    def sycl_kernel_path(self, code_path: str) -> str:
        """`kernel_path` under the name that existing SYCL extensions call."""
        return self.kernel_path(code_path)

    def sycl_kernel_include(self, code_path: str) -> str:
        """`kernel_include` under the name that existing SYCL extensions call."""
        return self.kernel_include(code_path)
