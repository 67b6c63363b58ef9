"""Builders of the SDK's CPU kernels: the loops are compiled once for each instruction-set level, the binding once.

A build for this machine has the one level it needs. A portable build has all levels of the architecture, and the
binding takes the best that the CPU has when it runs.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ds_plugin_sdk.op_builder import op_table
from ds_plugin_sdk.op_builder.builder import Library, builders_of
from ds_plugin_sdk.op_builder.languages import CppOpBuilder
from ds_plugin_sdk.paths import kernels_root

if TYPE_CHECKING:
    from ds_plugin_sdk.jit import Source

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

    def _use_library(self, library: Library) -> None:
        importlib.import_module("ds_plugin_sdk.ops._op_functions").take_library(library)
        function = getattr(importlib.import_module(f"ds_plugin_sdk.ops.{self._family()}"), "c_function", None)
        if function is not None:
            function.use_library(library)

    def compile_units(self, portable: bool) -> tuple[Source, ...]:
        from ds_plugin_sdk.jit import Source

        loops, binding = map(Path, self.sources())
        return (
            *(
                Source(loops, (f"-DDS_KERNELS_CPU_LEVEL={each.level}", *each.arguments), tag=each.level)
                for each in _levels(portable)
            ),
            # No loops over elements there: more optimisation only takes longer.
            Source(binding, ("-O1",)),
        )


class Level(NamedTuple):
    """An instruction-set level of the kernels: an entry of kernels/cpu/levels.json."""

    level: str
    cpu: str  # the level of the CPU that it needs, as `ds_plugin_sdk.jit.target` names it
    arguments: list[str]  # of the compiler


def levels(arch: str) -> list[Level]:
    """The levels of an architecture, ascending."""
    known = json.loads((kernels_root() / "cpu" / "levels.json").read_text(encoding="utf-8"))
    return [Level(**entry) for entry in known.get(arch, known["others"])]


def _levels(portable: bool) -> list[Level]:
    """The levels to compile: all of this architecture, or the best that this CPU has."""
    from ds_plugin_sdk.jit import target

    here = target.here()
    known = levels(here.arch)
    return known if portable else [level for level in known if here.runs(level.cpu)][-1:]


# FusedAdamBuilder, NormBuilder ...: a class for each op of the table that has a kernel for CPU tensors.
BUILDERS = builders_of(CPUKernelBuilder, [op for op in op_table.OPS if op.kernels])
globals().update(BUILDERS)
