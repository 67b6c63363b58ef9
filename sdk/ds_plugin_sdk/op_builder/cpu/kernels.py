"""Builders of the SDK's CPU kernels: the loops are compiled once for each instruction-set level, the binding once.

A build for this machine has the one level it needs. A portable build has all levels of the architecture, and the
binding takes the best that the CPU has when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ds_plugin_sdk.op_builder import op_table
from ds_plugin_sdk.op_builder.builder import builders_of
from ds_plugin_sdk.op_builder.languages import CppOpBuilder
from ds_plugin_sdk.paths import kernels_root

if TYPE_CHECKING:
    from ds_plugin_sdk.jit import Source

# Architecture -> level of the kernels -> (level of the CPU that it needs, compiler arguments). Ascending.
LEVELS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "x86_64": {
        "baseline": ("x86-64", ()),
        "avx2": ("x86-64-v3", ("-mavx2", "-mfma", "-mf16c")),
        "avx512": (
            "x86-64-v4",
            (
                "-mavx512f",
                "-mavx512bw",
                "-mavx512dq",
                "-mavx512vl",
                "-mfma",
                "-mf16c",
            ),
        ),
    },
    "aarch64": {"neon": ("armv8-a", ())},
    "ppc64le": {"baseline": ("power8", ()), "power9": ("power9", ("-mcpu=power9",))},
}
_ANYWHERE: dict[str, tuple[str, tuple[str, ...]]] = {"baseline": ("", ())}

_OPTIMISE = ("-O3", "-fno-math-errno", "-ffp-contract=fast")


class CPUKernelBuilder(CppOpBuilder):
    """A family of the SDK's CPU kernels: ``kernels/cpu/<family>.cpp`` and ``<family>_binding.cpp``."""

    NAME: ClassVar[str] = ""

    def owner(self) -> str:
        return "ds-plugin-sdk"

    def kernel_root(self) -> Path:
        return kernels_root()

    def _family(self) -> str:
        family = op_table.family_of(self.NAME)
        assert family is not None, f"{type(self).__name__}.NAME is no op of the SDK"
        return family

    def sources(self) -> list[str]:
        family = self._family()
        return [self.kernel_path(f"cpu/{family}.cpp"), self.kernel_path(f"cpu/{family}_binding.cpp")]

    def cxx_args(self) -> list[str]:
        return list(_OPTIMISE)

    def compile_units(self, portable: bool) -> tuple[Source, ...]:
        from ds_plugin_sdk.jit import Source

        loops, binding = map(Path, self.sources())
        levels = _levels(portable)
        return (
            *(
                Source(loops, (f"-DDS_KERNELS_CPU_LEVEL={level}", *args), tag=level)
                for level, (_, args) in levels.items()
            ),
            # No loops over elements there: more optimisation only takes longer.
            Source(binding, ("-O1",)),
        )


def _levels(portable: bool) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The levels to compile: all of this architecture, or the best that this CPU has."""
    from ds_plugin_sdk.jit import target

    here = target.here()
    levels = LEVELS.get(here.arch, _ANYWHERE)
    if portable:
        return levels
    fitting = [level for level, (needed, _) in levels.items() if here.runs(needed)]
    return {fitting[-1]: levels[fitting[-1]]}


# FusedAdamBuilder, NormBuilder ...: a class for each op of the table that has a kernel for CPU tensors.
BUILDERS = builders_of(CPUKernelBuilder, [op for op in op_table.OPS if op.kernels])
globals().update(BUILDERS)
